//! The figures of a run and the targets they are held against, printed as a table or as JSON.

use serde_json::{Value, json};

/// Figures and targets in the order in which they were added.
#[derive(Default)]
pub struct Report {
    figures: Vec<Figure>,
    targets: Vec<Target>,
}

struct Figure {
    name: String,
    value: f64,
    unit: &'static str,
    note: String,
}

struct Target {
    name: String,
    value: f64,
    target: f64,
    unit: &'static str,
    met: bool,
}

impl Report {
    pub fn figure(&mut self, name: impl Into<String>, value: f64, unit: &'static str, note: impl Into<String>) {
        self.figures.push(Figure { name: name.into(), value, unit, note: note.into() });
    }

    /// A target that is met from this value upwards.
    pub fn at_least(&mut self, name: impl Into<String>, value: f64, target: f64, unit: &'static str) {
        self.at_least_or(name, value, target, unit, false);
    }

    /// A target that is met up to this value.
    pub fn at_most(&mut self, name: impl Into<String>, value: f64, target: f64, unit: &'static str) {
        self.targets.push(Target { name: name.into(), value, target, unit, met: value <= target });
    }

    /// A target that is met from this value upwards, or if `excused`.
    pub fn at_least_or(&mut self, name: impl Into<String>, value: f64, target: f64, unit: &'static str, excused: bool) {
        self.targets.push(Target { name: name.into(), value, target, unit, met: value >= target || excused });
    }

    /// Prints to standard output.
    pub fn print(&self, as_json: bool) {
        if as_json {
            println!("{:#}", self.to_json());
            return;
        }
        let width = self.figures.iter().map(|figure| figure.name.len()).max().unwrap_or(0);
        for Figure { name, value, unit, note } in &self.figures {
            println!("{name:width$}  {:>12} {unit:8} {note}", number(*value));
        }
        println!();
        for Target { name, value, target, unit, met } in &self.targets {
            let verdict = if *met { "met" } else { "MISSED" };
            println!("{verdict:7} {name}: {} {unit} (target {})", number(*value), number(*target));
        }
    }

    fn to_json(&self) -> Value {
        json!({
            "figures": self.figures.iter().map(|Figure { name, value, unit, note }| json!({
                "name": name, "value": value, "unit": unit, "note": note,
            })).collect::<Vec<_>>(),
            "targets": self.targets.iter().map(|Target { name, value, target, unit, met }| json!({
                "name": name, "value": value, "target": target, "unit": unit, "met": met,
            })).collect::<Vec<_>>(),
        })
    }
}

fn number(value: f64) -> String {
    if value >= 100.0 { format!("{value:.0}") } else { format!("{value:.2}") }
}

/// The median; 0 for no values.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = [values.len().saturating_sub(1) / 2, values.len() / 2];
    middle.iter().filter_map(|index| values.get(*index)).sum::<f64>() / 2.0
}

/// Rate of doing all of these steps one after the other: what is left when they share the same processors.
pub fn sequential_rate(rates: &[f64]) -> f64 {
    1.0 / rates.iter().map(|rate| 1.0 / rate).sum::<f64>()
}

/// The median of some rounds and their range.
pub struct Spread {
    pub median: f64,
    /// For a note: number of rounds, minimum and maximum.
    pub range: String,
}

impl Spread {
    pub fn of(values: Vec<f64>) -> Self {
        let (min, max) = values.iter().fold((f64::MAX, 0.0_f64), |(min, max), value| (value.min(min), value.max(max)));
        let range = format!("{} rounds, {min:.0} to {max:.0}", values.len());
        Self { median: median(values), range }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_of_an_even_number_is_the_mean_of_the_middle_two() {
        assert_eq!(median(vec![9.0, 1.0, 3.0]), 3.0);
        assert_eq!(median(vec![9.0, 1.0, 3.0, 5.0]), 4.0);
        assert_eq!((median(vec![7.0]), median(vec![])), (7.0, 0.0));
    }

    #[test]
    fn two_equal_steps_in_sequence_have_half_the_rate_of_one() {
        assert_eq!(sequential_rate(&[100.0, 100.0]), 50.0);
    }
}
