//! How to acknowledge many deliveries in few frames. Pure.

use std::collections::{BTreeMap, BTreeSet};

/// One acknowledgement: this delivery, or with `multiple` all up to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Frame {
    pub(super) tag: u64,
    pub(super) multiple: bool,
}

/// How many of `settled` one frame can stand for: those at the front of `outstanding`, which are all deliveries of the
/// channel that were not acknowledged yet, the settled ones among them.
pub(super) fn in_turn<T>(outstanding: &BTreeMap<u64, T>, settled: &BTreeSet<u64>) -> usize {
    outstanding.keys().zip(settled).take_while(|(oldest, settled)| oldest == settled).count()
}

/// The frames that acknowledge `settled` and nothing else, of which the first `in_turn` are [in turn](in_turn).
pub(super) fn frames(settled: &BTreeSet<u64>, in_turn: usize) -> Vec<Frame> {
    let mut frames = Vec::new();
    let mut rest = settled.iter();
    if in_turn > 1 {
        frames.extend(rest.nth(in_turn - 1).map(|&tag| Frame { tag, multiple: true }));
    }
    frames.extend(rest.map(|&tag| Frame { tag, multiple: false }));
    frames
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(outstanding: &[u64], settled: &[u64]) -> Vec<(u64, bool)> {
        let outstanding: BTreeMap<u64, ()> = outstanding.iter().map(|&tag| (tag, ())).collect();
        let settled = settled.iter().copied().collect();
        frames(&settled, in_turn(&outstanding, &settled)).into_iter().map(|frame| (frame.tag, frame.multiple)).collect()
    }

    #[test]
    fn everything_settled_is_one_frame() {
        assert_eq!(of(&[1, 2, 3, 4], &[1, 2, 3, 4]), [(4, true)]);
        assert_eq!(of(&[7], &[7]), [(7, false)]);
        assert_eq!(of(&[], &[]), []);
    }

    #[test]
    fn a_frame_for_many_never_reaches_past_one_that_is_not_settled() {
        assert_eq!(of(&[1, 2, 3, 4, 5], &[1, 2, 4, 5]), [(2, true), (4, false), (5, false)]);
        assert_eq!(of(&[1, 2, 3], &[2, 3]), [(2, false), (3, false)]);
        assert_eq!(of(&[3, 9, 10], &[3, 9]), [(9, true)]);
    }
}
