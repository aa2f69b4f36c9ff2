//! Computes the fewest frames that acknowledge a set of deliveries. Pure.

use std::collections::{BTreeMap, BTreeSet};

/// One acknowledgement: of this delivery, or with `multiple` of all deliveries up to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct AckFrame {
    pub(super) tag: u64,
    pub(super) multiple: bool,
}

/// The number of `settled` deliveries that one multiple acknowledgement can cover: those at the front of `outstanding`,
/// which holds all unacknowledged deliveries of the channel, settled ones included.
pub(super) fn contiguous<T>(outstanding: &BTreeMap<u64, T>, settled: &BTreeSet<u64>) -> usize {
    outstanding.keys().zip(settled).take_while(|(oldest, settled)| oldest == settled).count()
}

/// The frames that acknowledge exactly `settled`, whose first `contiguous` entries need one frame ([`contiguous`]).
pub(super) fn frames(settled: &BTreeSet<u64>, contiguous: usize) -> Vec<AckFrame> {
    let mut frames = Vec::new();
    let mut rest = settled.iter();
    if contiguous > 1 {
        frames.extend(rest.nth(contiguous - 1).map(|&tag| AckFrame { tag, multiple: true }));
    }
    frames.extend(rest.map(|&tag| AckFrame { tag, multiple: false }));
    frames
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(outstanding: &[u64], settled: &[u64]) -> Vec<(u64, bool)> {
        let outstanding: BTreeMap<u64, ()> = outstanding.iter().map(|&tag| (tag, ())).collect();
        let settled = settled.iter().copied().collect();
        frames(&settled, contiguous(&outstanding, &settled))
            .into_iter()
            .map(|frame| (frame.tag, frame.multiple))
            .collect()
    }

    #[test]
    fn one_frame_acknowledges_all_outstanding_deliveries() {
        assert_eq!(of(&[1, 2, 3, 4], &[1, 2, 3, 4]), [(4, true)]);
        assert_eq!(of(&[7], &[7]), [(7, false)]);
        assert_eq!(of(&[], &[]), []);
    }

    #[test]
    fn a_multiple_frame_never_covers_an_unsettled_delivery() {
        assert_eq!(of(&[1, 2, 3, 4, 5], &[1, 2, 4, 5]), [(2, true), (4, false), (5, false)]);
        assert_eq!(of(&[1, 2, 3], &[2, 3]), [(2, false), (3, false)]);
        assert_eq!(of(&[3, 9, 10], &[3, 9]), [(9, true)]);
    }
}
