//! Figures side by side: for people as a table, for programs as JSON.

use serde_json::{Value, json};

/// What was measured.
#[derive(Debug, Default)]
pub struct Report {
    rows: Vec<Row>,
    bars: Vec<Bar>,
}

#[derive(Debug)]
struct Row {
    what: String,
    value: f64,
    unit: &'static str,
    note: String,
}

/// A bar that the product sets itself.
#[derive(Debug)]
struct Bar {
    what: String,
    value: f64,
    wanted: f64,
    unit: &'static str,
    holds: bool,
}

impl Report {
    /// Adds a figure.
    pub fn figure(&mut self, what: impl Into<String>, value: f64, unit: &'static str, note: impl Into<String>) {
        self.rows.push(Row { what: what.into(), value, unit, note: note.into() });
    }

    /// Adds a bar that holds if the value is at least that much.
    pub fn at_least(&mut self, what: impl Into<String>, value: f64, wanted: f64, unit: &'static str) {
        self.bars.push(Bar { what: what.into(), value, wanted, unit, holds: value >= wanted });
    }

    /// Adds a bar that holds if the value is at most that much.
    pub fn at_most(&mut self, what: impl Into<String>, value: f64, wanted: f64, unit: &'static str) {
        self.bars.push(Bar { what: what.into(), value, wanted, unit, holds: value <= wanted });
    }

    /// Adds a bar that holds if the value is at least that much, or for another reason.
    pub fn at_least_or(&mut self, what: impl Into<String>, value: f64, wanted: f64, unit: &'static str, or: bool) {
        self.bars.push(Bar { what: what.into(), value, wanted, unit, holds: value >= wanted || or });
    }

    /// Prints it.
    pub fn print(&self, as_json: bool) {
        if as_json {
            println!("{:#}", self.to_json());
            return;
        }
        let width = self.rows.iter().map(|row| row.what.len()).max().unwrap_or(0);
        for row in &self.rows {
            println!("{:width$}  {:>12} {:8} {}", row.what, number(row.value), row.unit, row.note);
        }
        println!();
        for bar in &self.bars {
            let verdict = if bar.holds { "holds" } else { "MISSED" };
            println!("{verdict:7} {}: {} {} (bar {})", bar.what, number(bar.value), bar.unit, number(bar.wanted));
        }
    }

    fn to_json(&self) -> Value {
        json!({
            "figures": self.rows.iter().map(|row| json!({
                "what": row.what, "value": row.value, "unit": row.unit, "note": row.note,
            })).collect::<Vec<_>>(),
            "bars": self.bars.iter().map(|bar| json!({
                "what": bar.what, "value": bar.value, "bar": bar.wanted, "unit": bar.unit, "holds": bar.holds,
            })).collect::<Vec<_>>(),
        })
    }
}

fn number(value: f64) -> String {
    if value >= 100.0 { format!("{value:.0}") } else { format!("{value:.2}") }
}

/// The middle one.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    // Of an even number there are two in the middle.
    let middle = [values.len().saturating_sub(1) / 2, values.len() / 2];
    middle.iter().filter_map(|place| values.get(*place)).sum::<f64>() / 2.0
}

/// The median of some rounds, and how far they were apart.
pub struct Spread {
    /// The middle one.
    pub median: f64,
    /// How many there were, from the least to the most.
    pub range: String,
}

impl Spread {
    /// Of these.
    pub fn of(values: Vec<f64>) -> Self {
        let (least, most) =
            values.iter().fold((f64::MAX, 0.0_f64), |(least, most), value| (value.min(least), value.max(most)));
        let range = format!("{} rounds, {least:.0} to {most:.0}", values.len());
        Self { median: median(values), range }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_of_an_even_number_is_between_the_two_in_the_middle() {
        assert_eq!(median(vec![9.0, 1.0, 3.0]), 3.0);
        assert_eq!(median(vec![9.0, 1.0, 3.0, 5.0]), 4.0);
        assert_eq!((median(vec![7.0]), median(vec![])), (7.0, 0.0));
    }
}
