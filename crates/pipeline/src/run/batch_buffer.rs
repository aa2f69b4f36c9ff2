//! Groups items until there are enough, or until the first has waited long enough. Pure: time comes in as `now`.

use std::time::Duration;

use tokio::time::Instant;

/// A batch being filled.
#[derive(Debug)]
pub(crate) struct Batch<T> {
    size: usize,
    timeout: Duration,
    items: Vec<T>,
    due: Option<Instant>,
}

impl<T> Batch<T> {
    /// One that is full at `size` items and late `timeout` after its first.
    pub(crate) fn new(size: usize, timeout: Duration) -> Self {
        Self { size: size.max(1), timeout, items: Vec::new(), due: None }
    }

    /// Adds an item; gives the batch away if it is full now.
    pub(crate) fn push(&mut self, item: T, now: Instant) -> Option<Vec<T>> {
        if self.items.is_empty() {
            self.due = Some(now + self.timeout);
        }
        self.items.push(item);
        if self.items.len() >= self.size { self.flush() } else { None }
    }

    /// When the batch is late; `None` while it is empty.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.due
    }

    /// Gives the batch away as it is, unless it is empty.
    pub(crate) fn flush(&mut self) -> Option<Vec<T>> {
        self.due = None;
        if self.items.is_empty() { None } else { Some(std::mem::take(&mut self.items)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn is_given_away_when_full_and_starts_anew() {
        let now = Instant::now();
        let mut batch = Batch::new(2, SECOND);
        assert_eq!(batch.push(1, now), None);
        assert_eq!(batch.push(2, now), Some(vec![1, 2]));
        assert_eq!(batch.due(), None);
        assert_eq!(batch.push(3, now), None);
        assert_eq!(batch.flush(), Some(vec![3]));
    }

    #[test]
    fn is_late_a_timeout_after_its_first_item_not_its_last() {
        let start = Instant::now();
        let mut batch = Batch::new(10, SECOND);
        assert_eq!(batch.due(), None);
        batch.push(1, start);
        batch.push(2, start + SECOND / 2);
        assert_eq!(batch.due(), Some(start + SECOND));
    }

    #[test]
    fn an_empty_batch_is_not_given_away() {
        let mut batch: Batch<u8> = Batch::new(10, SECOND);
        assert_eq!(batch.flush(), None);
    }

    #[test]
    fn a_size_of_zero_means_one() {
        assert_eq!(Batch::new(0, SECOND).push('a', Instant::now()), Some(vec!['a']));
    }
}
