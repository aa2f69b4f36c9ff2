//! Checks what the other tests rely on: the contracts work, and the forwarder accepts the harness's signatures.

use alloy_primitives::U256;
use alloy_sol_types::SolCall;
use harness::chain::{Chain, Contracts, Forwarder, Token, TransactionRequest, new_key};

#[tokio::test]
async fn a_user_without_ether_moves_tokens_through_the_forwarder() {
    let chain = Chain::shared();
    let contracts = Contracts::deploy(&chain).await;
    let (user, friend, relayer) = (new_key(), new_key(), chain.funded_key().await);
    contracts.give(user.address(), 10).await;

    let transfer = Token::transferCall { to: friend.address(), amount: U256::from(3) }.abi_encode();
    let request = contracts.request(user.address(), transfer).await;
    let signature = contracts.sign(&request, &user);
    assert!(contracts.verify(&request, &signature).await);
    let stranger = contracts.sign(&request, &friend);
    assert!(!contracts.verify(&request, &stranger).await);

    let execute = Forwarder::executeCall { request: request.signed(signature) }.abi_encode();
    let call = TransactionRequest::default().with_to(contracts.forwarder).with_input(execute);
    assert!(chain.send(&relayer, call).await.status());
    assert_eq!(contracts.tokens(friend.address()).await, U256::from(3));
    assert_eq!(contracts.tokens(user.address()).await, U256::from(7));
    assert_eq!(contracts.forwarder_nonce(user.address()).await, U256::from(1));
    assert_eq!(chain.balance(user.address()).await, U256::ZERO);
}
