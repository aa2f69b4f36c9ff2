//! Reads a relayer's list of transactions, and checks that the list proves itself: newest first throughout, pages and
//! total agree, and it shows the records that Baton bound there. A list that fails one of these checks may hide a
//! submission, so it proves no absence; what it does show is still true.
//!
//! [`ListReading`] is the check (pure), [`read`] asks the relayer. What the list then says about one submission is judged
//! in [`super::absence_proof`].

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use crate::clock::Clock;
use crate::mutations::Mutation;
use crate::relay::relayer::client::{RelayerClient, RelayerError};
use crate::relay::relayer::wire::Page;
use crate::relay::request::call::Call;
use crate::relay::state::apply_report::Report;
use crate::relay::state::transaction::RelayerTxId;
use crate::relay::store::BoundRecord;
use crate::timestamp::Timestamp;

/// The part of a relayer's list that was read.
#[derive(Debug, Clone)]
pub struct RelayerListing {
    /// The relevant records, oldest first.
    pub records: Vec<Report>,
    /// Creation time of the oldest record read, relevant or not.
    pub oldest: Option<Timestamp>,
    /// Why the list proves no absence; none if it proves itself.
    pub unproven: Option<&'static str>,
    /// When Baton bound the oldest of its own records that the list shows: the relayer has kept its records since.
    pub kept_since: Option<Timestamp>,
    /// The relayer's clock is at most this far behind ours.
    pub behind: Duration,
    /// The relayer's clock is at most this far ahead of ours.
    pub ahead: Duration,
    /// All records read that have a nonce.
    pub signed: Vec<SignedRecord>,
    /// When the list was requested.
    pub read_at: Timestamp,
}

/// A listed record that has a nonce.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SignedRecord {
    /// The relayer's id.
    pub tx_id: RelayerTxId,
    /// Its nonce.
    pub nonce: u64,
    /// When the relayer stored it. A record that was canceled or replaced keeps this time.
    pub created_at: Option<Timestamp>,
}

impl SignedRecord {
    fn of(record: &Report) -> Option<Self> {
        let (tx_id, created_at) = (record.tx_id.clone(), record.created_at);
        record.nonce.map(|nonce| Self { tx_id, nonce, created_at })
    }
}

/// What a reading of a list must cover.
pub struct Coverage<'a> {
    /// The calls that are looked for.
    pub calls: &'a [&'a Call],
    /// The list is read back to before this time.
    pub reach: Timestamp,
    /// Records that Baton bound there, newest first. The list must show those that it reaches back to.
    pub witnesses: &'a [BoundRecord],
    /// Records that the relayer has given no answer about for long: it may have forgotten them. The list must show these too,
    /// or the relayer know them by their id.
    pub silent: &'a [RelayerTxId],
    /// Allowed difference between the relayer's clock and ours.
    pub skew: Duration,
    /// Time limit of a question to the relayer.
    pub timeout: Duration,
}

/// Records on a page of a relayer's list: the first, or the next if such a page is too long.
const PAGE_SIZES: [usize; 3] = [500, 50, 5];
/// Maximum number of records read of a relayer's list.
const RECORDS_MAX: usize = 100_000;
/// Maximum number of records read beyond that for records of ours that have not come up yet.
const RECORDS_FURTHER: usize = 10_000;
/// Maximum number of pages read, however small they are.
const PAGES_MAX: usize = 2000;
/// Maximum number of missing records that the relayer is asked for one by one.
const MISSING_ASKED_MAX: usize = 20;
/// Assumed difference of the clocks where no record of ours shows it. A `Date` header does not: a proxy may have written it.
const UNKNOWN_SKEW: Duration = Duration::from_secs(600);

/// Reads the list, newest first, until it reaches back far enough, and checks it. Large records are read in smaller pages, so
/// that memory is bounded whatever the relayer holds.
pub async fn read(
    client: &RelayerClient,
    coverage: &Coverage<'_>,
    clock: &Clock,
) -> Result<RelayerListing, RelayerError> {
    let mut read = Err(RelayerError::TooLong);
    for size in PAGE_SIZES {
        // Pages of two sizes do not fit together: the reading starts over.
        read = read_in_pages(client, coverage, clock, size).await;
        if !matches!(read, Err(RelayerError::TooLong)) {
            break;
        }
    }
    read
}

/// Adds the nonces of the newest records, those that the relayer has signed since it was asked for the list among them. It
/// leaves out the records of these calls: whether one of them is a lost submission is for another list to tell.
pub async fn add_newest(listing: &mut RelayerListing, client: &RelayerClient, calls: &[&Call], timeout: Duration) {
    let known: HashSet<RelayerTxId> = listing.signed.iter().map(|record| record.tx_id.clone()).collect();
    for size in PAGE_SIZES {
        match client.transactions(1, size, timeout).await {
            Ok((page, _)) => {
                let others = page.records.iter().filter(|record| !calls.iter().any(|call| call.is_still(record)));
                let new = others.filter(|record| !known.contains(&record.tx_id)).filter_map(SignedRecord::of);
                listing.signed.extend(new);
            }
            Err(RelayerError::TooLong) => continue,
            Err(_) => {}
        }
        break;
    }
}

async fn read_in_pages(
    client: &RelayerClient,
    coverage: &Coverage<'_>,
    clock: &Clock,
    size: usize,
) -> Result<RelayerListing, RelayerError> {
    let read_at = clock.now();
    let mut reading = ListReading::new(coverage.witnesses, coverage.skew).with_silent(coverage.silent);
    let mut records = Vec::new();
    let mut finished = false;
    let mut further = RECORDS_FURTHER / size;
    for number in 1..=(RECORDS_MAX / size).min(PAGES_MAX) as u64 {
        let (page, date) = client.transactions(number, size, coverage.timeout).await?;
        if let Some(date) = date {
            reading.date(date, clock.now());
        }
        let relevant = |record: &&Report| record.is_no_op() || coverage.calls.iter().any(|call| call.is_still(record));
        for record in reading.add(number, &page).into_iter().filter(relevant) {
            records.push(record.clone());
        }
        // A record that was bound long after the relayer stored it is further down.
        let far_enough = reading.reaches(coverage.reach) && {
            further = further.saturating_sub(1);
            further == 0 || reading.missing(read_at).next().is_none()
        };
        if page.is_last() || far_enough {
            finished = true;
            reading.end(page.is_last());
            break;
        }
    }
    if !finished {
        reading.fail("the relayer's list is too long to search");
    }
    let missing: Vec<RelayerTxId> = reading.missing(read_at).cloned().collect();
    for tx_id in missing.iter().take(MISSING_ASKED_MAX) {
        match client.transaction(tx_id, coverage.timeout).await {
            Ok(found) => reading.missing_is(found.as_ref()),
            Err(_) => reading.fail("the relayer could not be asked for a record that its list does not show"),
        }
    }
    if missing.len() > MISSING_ASKED_MAX {
        reading.fail("the relayer's list lacks more transactions than the relayer is asked for");
    }
    records.reverse();
    Ok(reading.listing(records, read_at))
}

/// The checks of one reading.
pub struct ListReading<'a> {
    witnesses: &'a [BoundRecord],
    silent: &'a [RelayerTxId],
    skew: Duration,
    /// Every record read, with its creation time.
    created: HashMap<RelayerTxId, Timestamp>,
    signed: Vec<SignedRecord>,
    oldest: Option<Timestamp>,
    /// The list's total at the first page, and at the last one read.
    totals: Option<(u64, u64)>,
    to_end: bool,
    /// Largest difference of the `Date` header to our clock.
    date_off: Option<Duration>,
    unproven: Option<&'static str>,
}

impl<'a> ListReading<'a> {
    /// Nothing read yet.
    pub fn new(witnesses: &'a [BoundRecord], skew: Duration) -> Self {
        Self {
            witnesses,
            silent: &[],
            skew,
            created: HashMap::new(),
            signed: Vec::new(),
            oldest: None,
            totals: None,
            to_end: false,
            date_off: None,
            unproven: None,
        }
    }

    /// The same with these silent records. They tell nothing of the relayer's clock: they may be a status lookup's, bound long
    /// after they were stored.
    pub fn with_silent(self, silent: &'a [RelayerTxId]) -> Self {
        Self { silent, ..self }
    }

    /// Adds the page of that number; returns its records that no earlier page had. New records push others onto the next
    /// page while the list is read: a record may be read twice, but none is missed.
    pub fn add<'p>(&mut self, number: u64, page: &'p Page) -> Vec<&'p Report> {
        self.check_counts(number, page);
        let mut new = Vec::new();
        for record in &page.records {
            if self.created.contains_key(&record.tx_id) {
                continue;
            }
            match record.created_at {
                Some(created) if self.oldest.is_some_and(|oldest| created > oldest) => {
                    self.fail("the relayer's list is not sorted: a later record follows an earlier one");
                }
                Some(_) => {}
                None => self.fail("a record of the relayer's list has no creation time"),
            }
            self.oldest = record.created_at.into_iter().chain(self.oldest).min();
            self.created.insert(record.tx_id.clone(), record.created_at.unwrap_or(Timestamp(0)));
            self.signed.extend(SignedRecord::of(record));
            new.push(record);
        }
        new
    }

    fn check_counts(&mut self, number: u64, page: &Page) {
        let Some(counts) = page.counts else { return self.fail("the relayer's list does not say how long it is") };
        if counts.page != number {
            return self.fail("the relayer answered with another page of its list");
        }
        let before = (counts.page - 1).saturating_mul(counts.size);
        let expected = counts.total.saturating_sub(before).min(counts.size);
        if page.records.len() as u64 != expected {
            self.fail("a page of the relayer's list has another number of records than it says");
        }
        let (first, last) = self.totals.unwrap_or((counts.total, counts.total));
        if counts.total < last {
            self.fail("the relayer's list became shorter while it was read");
        }
        self.totals = Some((first, counts.total));
    }

    /// Learns the `Date` header of an answer that came at `now`.
    pub fn date(&mut self, date: Timestamp, now: Timestamp) {
        let off = date.since(now).max(now.since(date));
        self.date_off = Some(self.date_off.unwrap_or_default().max(off));
    }

    /// Whether the list was read back to before this time, by the relayer's own clock.
    pub fn reaches(&self, reach: Timestamp) -> bool {
        self.oldest.is_some_and(|oldest| oldest < reach - self.behind())
    }

    /// The reading is over; `to_end`: no page follows.
    pub fn end(&mut self, to_end: bool) {
        self.to_end = to_end;
        if to_end && self.totals.is_some_and(|(first, _)| (self.created.len() as u64) < first) {
            self.fail("the pages of the relayer's list have fewer records than its total says");
        }
    }

    /// Records of ours, bound before the list was requested, that it does not show.
    pub fn missing(&self, read_at: Timestamp) -> impl Iterator<Item = &'a RelayerTxId> {
        let ours = self.witnesses.iter().filter(move |witness| witness.at < read_at);
        let ours = ours.map(|witness| &witness.tx_id).chain(self.silent);
        ours.filter(|tx_id| !self.created.contains_key(tx_id))
    }

    /// Learns what the relayer says of a record that its list does not show. One that is older than the part that was
    /// read is rightly missing.
    pub fn missing_is(&mut self, found: Option<&Report>) {
        if Mutation::NoMemoryProof.is_on() {
            return;
        }
        let older = |created: Timestamp| !self.to_end && self.oldest.is_some_and(|oldest| created < oldest);
        match found {
            None => self.fail("the relayer has forgotten transactions that it had before"),
            Some(record) if record.created_at.is_some_and(older) => {}
            Some(_) => self.fail("the relayer's list does not show a transaction that the relayer knows"),
        }
    }

    /// The list proves no absence, for this reason.
    pub fn fail(&mut self, why: &'static str) {
        if !Mutation::TrustsAnyList.is_on() {
            self.unproven.get_or_insert(why);
        }
    }

    /// What was read.
    pub fn listing(self, records: Vec<Report>, read_at: Timestamp) -> RelayerListing {
        RelayerListing {
            records,
            oldest: self.oldest,
            unproven: self.unproven,
            kept_since: self.shown().map(|(witness, _)| witness.at).min(),
            behind: self.behind(),
            ahead: self.ahead(),
            signed: self.signed,
            read_at,
        }
    }

    /// How far the relayer's clock is ahead of ours, at least: by its creation time of a record that we know to have
    /// existed when we bound it. `None` if the list shows no record of ours.
    fn offset_ms(&self) -> Option<i64> {
        self.shown().map(|(witness, created)| created.0 - witness.at.0).max()
    }

    /// Records of ours that the list shows, with their creation time.
    fn shown(&self) -> impl Iterator<Item = (&BoundRecord, Timestamp)> {
        self.witnesses.iter().filter_map(|witness| Some((witness, *self.created.get(&witness.tx_id)?)))
    }

    fn behind(&self) -> Duration {
        self.difference(self.offset_ms().map(|offset| -offset))
    }

    fn ahead(&self) -> Duration {
        self.difference(self.offset_ms())
    }

    /// The largest possible difference of the clocks in one direction, given what our records show of it.
    fn difference(&self, seen_ms: Option<i64>) -> Duration {
        let date = self.date_off.unwrap_or_default();
        match seen_ms {
            Some(seen) => self.skew + Duration::from_millis(u64::try_from(seen).unwrap_or(0)).max(date),
            None => (self.skew + date).max(UNKNOWN_SKEW),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::relay::relayer::wire::{read_page, read_record};

    const SKEW: Duration = Duration::from_secs(30);

    fn at(second: i64) -> Timestamp {
        Timestamp(1_700_000_000_000 + second * 1000)
    }

    fn record(id: &str, second: i64) -> Value {
        let created = time::OffsetDateTime::from_unix_timestamp(at(second).0 / 1000).unwrap();
        let created = created.format(&time::format_description::well_known::Rfc3339).unwrap();
        json!({ "id": id, "status": "pending", "created_at": created, "nonce": second })
    }

    fn page(number: u64, size: u64, total: u64, records: &[Value]) -> Page {
        let pagination = json!({ "current_page": number, "per_page": size, "total_items": total });
        read_page(&json!({ "data": records, "pagination": pagination })).unwrap()
    }

    fn witness(id: &str, second: i64) -> BoundRecord {
        BoundRecord { tx_id: RelayerTxId(id.into()), at: at(second), account: None }
    }

    /// Reads these pages to the end of the list.
    fn unproven(pages: &[Page], witnesses: &[BoundRecord]) -> Option<&'static str> {
        let mut reading = ListReading::new(witnesses, SKEW);
        for (index, page) in pages.iter().enumerate() {
            reading.add(index as u64 + 1, page);
        }
        reading.end(true);
        let missing: Vec<_> = reading.missing(at(1000)).cloned().collect();
        missing.iter().for_each(|_| reading.missing_is(None));
        reading.listing(Vec::new(), at(1000)).unproven
    }

    #[test]
    fn a_sorted_list_whose_pages_and_total_agree_proves_itself() {
        let pages = [page(1, 2, 3, &[record("c", 3), record("b", 2)]), page(2, 2, 3, &[record("a", 1)])];
        assert_eq!(unproven(&pages, &[witness("a", 1), witness("c", 3)]), None);
        assert_eq!(unproven(&[page(1, 2, 0, &[])], &[]), None, "an empty list");
    }

    #[test]
    fn records_that_move_to_the_next_page_while_it_is_read_are_no_disorder() {
        let pages =
            [page(1, 2, 3, &[record("c", 3), record("b", 2)]), page(2, 2, 4, &[record("b", 2), record("a", 1)])];
        assert_eq!(unproven(&pages, &[]), None);
    }

    #[test]
    fn a_list_that_is_not_sorted_proves_nothing() {
        let pages = [page(1, 2, 3, &[record("a", 1), record("c", 3)]), page(2, 2, 3, &[record("b", 2)])];
        assert!(unproven(&pages, &[]).unwrap().contains("not sorted"));
    }

    #[test]
    fn a_page_with_fewer_records_than_it_says_proves_nothing() {
        let pages = [page(1, 500, 600, &[record("b", 2)]), page(2, 500, 600, &[record("a", 1)])];
        assert!(unproven(&pages, &[]).unwrap().contains("number of records"));
        let shrunk = [page(1, 1, 2, &[record("b", 2)]), page(2, 1, 1, &[])];
        assert!(unproven(&shrunk, &[]).unwrap().contains("shorter"));
        let repeated = [page(1, 1, 2, &[record("b", 2)]), page(2, 1, 2, &[record("b", 2)])];
        assert!(unproven(&repeated, &[]).unwrap().contains("total"));
        assert!(unproven(&[page(7, 1, 1, &[record("b", 2)])], &[]).unwrap().contains("another page"));
        let uncounted = read_page(&json!({ "data": [] })).unwrap();
        assert!(unproven(&[uncounted], &[]).unwrap().contains("how long"));
        let undated = json!({ "id": "x", "status": "pending" });
        assert!(unproven(&[page(1, 1, 1, &[undated])], &[]).unwrap().contains("no creation time"));
    }

    #[test]
    fn a_list_without_a_record_that_we_bound_there_proves_nothing() {
        let pages = [page(1, 2, 1, &[record("a", 1)])];
        assert!(unproven(&pages, &[witness("b", 2), witness("a", 1)]).unwrap().contains("forgotten"));
        let mut reading = ListReading::new(&[], SKEW);
        reading.add(1, &pages[0]);
        reading.end(true);
        reading.missing_is(read_record(&record("b", 2)).as_ref());
        assert!(reading.listing(Vec::new(), at(9)).unproven.unwrap().contains("does not show"));
    }

    #[test]
    fn a_list_without_a_silent_record_proves_nothing_and_one_with_it_does() {
        let silent = [RelayerTxId("a".into())];
        for (id, missing) in [("a", 0), ("b", 1)] {
            let mut reading = ListReading::new(&[], SKEW).with_silent(&silent);
            reading.add(1, &page(1, 2, 1, &[record(id, 1)]));
            reading.end(true);
            assert_eq!(reading.missing(at(1000)).count(), missing);
            let listing = reading.listing(Vec::new(), at(1000));
            assert_eq!((listing.behind, listing.kept_since), (UNKNOWN_SKEW, None), "it is no witness");
        }
    }

    #[test]
    fn a_record_from_before_the_part_that_was_read_is_rightly_missing() {
        let pages = [page(1, 1, 2, &[record("b", 100)])];
        let mut reading = ListReading::new(&[], SKEW);
        reading.add(1, &pages[0]);
        reading.end(false);
        reading.missing_is(read_record(&record("a", 50)).as_ref());
        assert_eq!(reading.listing(Vec::new(), at(200)).unproven, None);
    }

    #[test]
    fn the_relayers_clock_is_measured_by_records_that_we_know() {
        let witnesses = [witness("b", 100), witness("a", 50)];
        // 90 s behind, whatever a proxy writes into the `Date` header.
        let pages = [page(1, 2, 2, &[record("b", 10), record("a", -41)])];
        let mut reading = ListReading::new(&witnesses, SKEW);
        reading.add(1, &pages[0]);
        reading.date(at(200), at(200));
        assert!(!reading.reaches(at(75)), "a record of that time would be further down");
        assert!(reading.reaches(at(80)));
        let listing = reading.listing(Vec::new(), at(200));
        assert_eq!((listing.behind, listing.ahead), (SKEW + Duration::from_secs(90), SKEW));
        assert_eq!(listing.kept_since, Some(at(50)));
    }

    #[test]
    fn without_a_known_record_the_clock_may_be_far_off_whatever_a_date_says() {
        let listing = ListReading::new(&[], SKEW).listing(Vec::new(), at(0));
        assert_eq!((listing.behind, listing.ahead, listing.kept_since), (UNKNOWN_SKEW, UNKNOWN_SKEW, None));
        let mut dated = ListReading::new(&[], SKEW);
        dated.date(at(5), at(0));
        assert_eq!(dated.listing(Vec::new(), at(0)).behind, UNKNOWN_SKEW, "a proxy may have written it");
        let mut far_off = ListReading::new(&[], SKEW);
        far_off.date(at(5000), at(0));
        assert_eq!(far_off.listing(Vec::new(), at(0)).behind, SKEW + Duration::from_secs(5000));
    }
}
