//! How a world begins: what its clients will post, its relayers, their past, and its processes.

use baton::config::RelayMode;
use baton::relay::state::transaction::{
    Binding, ConsumerId, Progress, RelayerTxId, RelayerUrl, Status, Transaction, TransactionId,
};
use baton::timestamp::Timestamp;
use uuid::Uuid;

use super::network::url;
use super::relayers::{Making, Node, SIGNED_FAILURES};
use super::setup::{Fault, Mutation, Setup};
use super::world::{CONTENTS, Effect, HISTORY, Process, SIGNERS, TIMINGS, Truth, World, direct_request};

/// What a client posts.
#[derive(Debug, Clone, Copy)]
pub enum Post {
    Direct(usize),
    /// Signer, and seconds until the deadline.
    Gasless(usize, i64),
}

/// What clients post, and for how many steps there are faults.
pub fn plan(world: &mut World, setup: &Setup) -> (Vec<(i64, Post)>, u64) {
    // Most worlds are small: nearly every mistake needs few transactions, and small worlds are quick.
    let small = !world.rng.one_in(3);
    let transactions = if small { 1 + world.rng.below(3) } else { 3 + world.rng.below(4) };
    let transactions = transactions.min(setup.transactions_max);
    // Few contents among many transactions, so that equal ones meet.
    let (first, contents) = match setup.shape {
        Mutation::TakesWhileOpen | Mutation::TakesUnproven | Mutation::IgnoresTaken => {
            (world.rng.below(CONTENTS as u64), 1)
        }
        Mutation::TakesOldest => (CONTENTS as u64 - 2, 2),
        _ => (world.rng.below(CONTENTS as u64), 1 + world.rng.below(CONTENTS as u64)),
    };
    let gasless = match setup.shape {
        Mutation::NoNonceOrder | Mutation::NoDeadline => true,
        Mutation::None => world.rng.one_in(3),
        _ => false,
    };
    let post = |world: &mut World| {
        if gasless && !world.rng.one_in(3) {
            let seconds = world.rng.pick(&[20, 60, 120]);
            return Post::Gasless(world.rng.below(SIGNERS as u64) as usize, seconds);
        }
        Post::Direct(((first + world.rng.below(contents)) % CONTENTS as u64) as usize)
    };
    let late: &[i64] = match setup.shape {
        Mutation::TakesWhileOpen | Mutation::TakesOldest => &[0],
        _ => &[0, 0, 0, 1000, 40_000],
    };
    let mut posts: Vec<(i64, Post)> =
        (0..transactions).map(|_| (world.now + world.rng.pick(late), post(world))).collect();
    if setup.shape == Mutation::TakesUnproven {
        // One transaction, a relayer that forgets it, and an equal one later.
        posts = vec![(world.now, Post::Direct(0)), (world.now + 40_000, Post::Direct(0))];
        world.forget_at = Some(world.now + world.rng.pick(&[5_000, 20_000, 39_000]));
    }
    let faulty_steps = match setup.shape {
        // These need a minute of faults.
        Mutation::NoSecondLook
        | Mutation::HastySecondLook
        | Mutation::TakesUnproven
        | Mutation::NoUnprovenWait
        | Mutation::TrustsAnyList
        | Mutation::UsedIsSettled
        | Mutation::FillerByName => 300 + world.rng.below(300),
        _ if small => 40 + world.rng.below(200),
        _ => 120 + world.rng.below(400),
    };
    (posts, faulty_steps.min(setup.faulty_steps_max))
}

/// Relayers, with a transaction from long ago at most of them, and processes.
pub fn build(world: &mut World, shape: Mutation) {
    let (faults, now) = (world.faults, world.now);
    let chain = world.evm.is_some();
    if shape == Mutation::UsedIsSettled {
        // What is sent early is mined late, shortly before its absence is proven.
        let full_until = now + world.rng.pick(&[92_000, 96_000]);
        world.evm.iter_mut().for_each(|chain| chain.full_until = full_until);
        world.forget_at = Some(now + world.rng.pick(&[5_000, 20_000, 35_000]));
    }
    // What no chain would tell is left out where there is none.
    let leaves_gaps = world.has(Fault::LoseLast) || world.has(Fault::Forget);
    let signed = world.rng.pick(match (chain, leaves_gaps) {
        (true, false) => &SIGNED_FAILURES,
        (true, true) => &SIGNED_FAILURES[..5],
        (false, _) => &SIGNED_FAILURES[..2],
    });
    let signed = shape.likely_outcome().unwrap_or(signed);
    let making = Making { skewed: world.has(Fault::Skew), faults, chain, shape, signed, now };
    for index in 0..2 {
        // With a witness, a relayer that has lost its memory is found out.
        let without = matches!(shape, Mutation::TakesUnproven | Mutation::NoUnprovenWait);
        let history = !world.rng.one_in(3) && !without;
        let node = Node::new(index, &mut world.rng, history, &making);
        world.open_account(&node);
        if let Some(tx_id) = &node.history {
            let request = direct_request(HISTORY);
            let made = Timestamp(now - 1_000_000);
            let id = TransactionId(Uuid::from_u128((made.0 as u128) << 80 | index as u128));
            let mut row = Transaction::accepted(id, &request, String::new(), made, &TIMINGS);
            row.status = if world.mode == RelayMode::Confirm { Status::Success } else { Status::Confirmed };
            row.check_at = None;
            let (relayer, tx_id) = (RelayerUrl(url(index)), RelayerTxId(tx_id.clone()));
            world.owners.push((tx_id.clone(), id));
            world.bound_ever.push((tx_id.clone(), id));
            row.binding = Some(Binding {
                relayer,
                tx_id,
                at: made,
                progress: Progress::Submitted,
                nonce: Some(0),
                forgotten_since: None,
            });
            world.rows.push(row);
            world.truth.push(Truth {
                effect: Effect::of(&request.call),
                promised: None,
                seen: (0, 0),
                panics: 0,
                gasless: None,
                excusable: false,
                history: true,
            });
        }
        world.nodes.push(node);
    }
    world.tell_relayers();
    // Equal transactions meet at one relayer.
    let one = matches!(
        shape,
        Mutation::TakesWhileOpen | Mutation::TakesUnproven | Mutation::TakesOldest | Mutation::IgnoresTaken
    );
    world.nodes[1].down = one;
    for _ in 0..2 + world.rng.below(2) {
        let run = world.new_id();
        world.processes.push(Process {
            id: ConsumerId(format!("c{run}")),
            run,
            alive: true,
            restart_at: 0,
            frozen_until: 0,
            starved: false,
            handling: 0,
            sweeping: [false; 5],
            sweep_after: [0; 5],
            checking_health: false,
            health_after: 0,
        });
    }
}
