//! Collects items into a batch until it is full or its first item has waited for the timeout. Pure: time enters as `now`.

use std::time::Duration;

use tokio::time::Instant;

/// A batch that is being filled.
#[derive(Debug)]
pub(super) struct BatchBuffer<T> {
    size: usize,
    timeout: Duration,
    items: Vec<T>,
    due: Option<Instant>,
}

impl<T> BatchBuffer<T> {
    /// Full at `size` items (at least 1), due `timeout` after the first item.
    pub(super) fn new(size: usize, timeout: Duration) -> Self {
        Self { size: size.max(1), timeout, items: Vec::new(), due: None }
    }

    /// Adds an item, and returns the batch if it is full now.
    pub(super) fn push(&mut self, item: T, now: Instant) -> Option<Vec<T>> {
        if self.items.is_empty() {
            self.due = Some(now + self.timeout);
        }
        self.items.push(item);
        if self.items.len() >= self.size { self.flush() } else { None }
    }

    /// When the batch has to be flushed; `None` while it is empty.
    pub(super) fn due(&self) -> Option<Instant> {
        self.due
    }

    /// Returns the items collected so far, unless there are none.
    pub(super) fn flush(&mut self) -> Option<Vec<T>> {
        self.due = None;
        if self.items.is_empty() { None } else { Some(std::mem::take(&mut self.items)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_full_batch_is_returned_and_the_next_one_starts_empty() {
        let now = Instant::now();
        let mut batch = BatchBuffer::new(2, SECOND);
        assert_eq!(batch.push(1, now), None);
        assert_eq!(batch.push(2, now), Some(vec![1, 2]));
        assert_eq!(batch.due(), None);
        assert_eq!(batch.push(3, now), None);
        assert_eq!(batch.flush(), Some(vec![3]));
    }

    #[test]
    fn a_batch_is_due_a_timeout_after_its_first_item_not_its_last() {
        let start = Instant::now();
        let mut batch = BatchBuffer::new(10, SECOND);
        assert_eq!(batch.due(), None);
        batch.push(1, start);
        batch.push(2, start + SECOND / 2);
        assert_eq!(batch.due(), Some(start + SECOND));
    }

    #[test]
    fn flushing_an_empty_batch_returns_nothing() {
        let mut batch: BatchBuffer<u8> = BatchBuffer::new(10, SECOND);
        assert_eq!(batch.flush(), None);
    }

    #[test]
    fn a_size_of_zero_means_one() {
        assert_eq!(BatchBuffer::new(0, SECOND).push('a', Instant::now()), Some(vec!['a']));
    }
}
