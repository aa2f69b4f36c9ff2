//! What is read once and shared between rows and looks. Providers charge for calls.

use std::sync::atomic::AtomicU64;

use super::*;

const MINED: u64 = 15;
const HEAD: u64 = 40;

/// A node whose head a test moves on, and what it was asked.
struct Asked {
    head: Arc<AtomicU64>,
    asked: Arc<Mutex<Vec<String>>>,
    reader: AccountReader,
}

impl Asked {
    fn node(historical: bool) -> Self {
        let head = Arc::new(AtomicU64::new(HEAD));
        let now = Arc::clone(&head);
        let nodes = Nodes::of(move |_: &str, method: &str, params: &Value| {
            let state = State { head: now.load(Ordering::Relaxed), mined: Some(MINED), historical };
            Ok((200, state.answer(method, params)))
        });
        let asked = Arc::clone(&nodes.asked);
        let clock = HandClock::new();
        clock.pass(Duration::from_secs(HEAD * BLOCK_TIME));
        Self { head, asked, reader: reader_at(Clock::new(clock), "http://node", Unhurried(nodes)) }
    }

    /// The method and parameters of each call since the last time.
    fn take(&self) -> Vec<(String, Value)> {
        let parse = |body: String| serde_json::from_str(&body).unwrap();
        let bodies: Vec<Value> = std::mem::take(&mut *self.asked.lock().unwrap()).into_iter().map(parse).collect();
        bodies.into_iter().map(|body| (body["method"].as_str().unwrap().to_owned(), body["params"].clone())).collect()
    }

    /// The numbers of the blocks that were read with their transactions since the last time.
    fn take_blocks(&self) -> Vec<u64> {
        let mut blocks: Vec<u64> = self
            .take()
            .iter()
            .filter(|(_, params)| params[1] == true)
            .filter_map(|(_, params)| number(&params[0]))
            .collect();
        blocks.sort_unstable();
        blocks
    }

    /// The account's transactions since this block, as a row sees them.
    async fn found(&self, since_block: u64) -> usize {
        let since = Timestamp(0) + Duration::from_secs(since_block * BLOCK_TIME);
        self.reader.history(ACCOUNT, since).await.unwrap().transactions.len()
    }
}

/// Lets other tasks run before each answer.
struct Unhurried<T>(T);

#[async_trait]
impl<T: Transport> Transport for Unhurried<T> {
    async fn send(&self, request: HttpRequest) -> Result<Response, TransportError> {
        tokio::task::yield_now().await;
        self.0.send(request).await
    }
}

#[tokio::test]
async fn another_row_and_another_look_at_the_same_head_read_no_block_again() {
    for historical in [true, false] {
        let node = Asked::node(historical);
        assert_eq!(node.found(12).await, 1);
        assert!(node.take_blocks().contains(&MINED));
        // Whether the head is the same, the pool, and a check of what is kept.
        let mut calls = vec![
            ("eth_getBlockByNumber".to_owned(), json!(["latest", false])),
            ("eth_getTransactionCount".to_owned(), json!([ACCOUNT.to_string(), "pending"])),
        ];
        if historical {
            let final_block = format!("{:#x}", HEAD - FINALITY);
            calls.push(("eth_getTransactionCount".to_owned(), json!([ACCOUNT.to_string(), final_block])));
        }
        for _ in 0..2 {
            assert_eq!(node.found(12).await, 1);
            assert_eq!(node.take(), calls);
        }
        assert_eq!(node.found(14).await, 1, "a row that was bound later");
        assert!(node.take_blocks().is_empty());
        assert_eq!(node.found(18).await, 0, "a row that was bound after the transaction");
        assert!(node.take_blocks().is_empty());
        assert_eq!(node.found(9).await, 1, "an older row");
        let older = if historical { vec![] } else { vec![9, 10, 11] };
        assert_eq!(node.take_blocks(), older, "only what is older is read");
    }
}

#[tokio::test]
async fn two_rows_that_look_at_the_same_time_share_one_reading() {
    for historical in [true, false] {
        let node = Asked::node(historical);
        node.found(12).await;
        let alone = node.take_blocks();
        let node = Asked::node(historical);
        assert_eq!(tokio::join!(node.found(12), node.found(12)), (1, 1));
        assert_eq!(node.take_blocks(), alone);
    }
}

#[tokio::test]
async fn a_new_head_costs_only_the_blocks_that_are_not_final_or_have_just_become_it() {
    for historical in [true, false] {
        let node = Asked::node(historical);
        node.found(12).await;
        node.take();
        node.head.store(HEAD + 1, Ordering::Relaxed);
        assert_eq!(node.found(12).await, 1);
        // With history the counts tell that they contain nothing of the account.
        let newest = if historical { vec![] } else { (HEAD - FINALITY + 1..=HEAD + 1).collect() };
        assert_eq!(node.take_blocks(), newest);
    }
}
