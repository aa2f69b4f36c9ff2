//! How a transaction was settled, read from its timeline.

use std::collections::BTreeMap;

use serde_json::Value;

/// What happened to transactions on their way, each with the number of them. One transaction may have several.
#[derive(Default)]
pub struct Ways(BTreeMap<&'static str, usize>);

impl Ways {
    /// `rpc`: the chain was asked.
    pub fn add(&mut self, timeline: &[Value], rpc: bool) {
        for way in ways(timeline, rpc) {
            *self.0.entry(way).or_default() += 1;
        }
    }

    pub fn iter(&self) -> impl Iterator<Item = (&'static str, usize)> {
        self.0.iter().map(|(way, count)| (*way, *count))
    }
}

fn ways(timeline: &[Value], rpc: bool) -> Vec<&'static str> {
    let step = |action: &str, text: &str| {
        timeline
            .iter()
            .any(|step| step["action"] == action && step["detail"].as_str().is_some_and(|d| d.contains(text)))
    };
    let says = |words: &[&str]| {
        let said = |word: &&str| format!("the relayer says {word}");
        timeline.iter().any(|step| {
            step["detail"].as_str().is_some_and(|detail| words.iter().any(|word| detail.starts_with(&said(word))))
        })
    };
    let ended = timeline.iter().rev().map(|step| step["action"].as_str().unwrap_or_default());
    let end = ended.into_iter().find(|action| matches!(*action, "confirmed" | "failed"));
    let mut ways = vec![match (end, says(&["confirmed"]), says(&["failed", "canceled", "expired"])) {
        (Some("confirmed"), ..) if !rpc => "end: confirmed by the relayer's word",
        (Some("confirmed"), true, _) => "end: confirmed, and the relayer said so",
        (Some("confirmed"), false, true) => "end: confirmed by the chain against the relayer's word",
        (Some("confirmed"), false, false) => "end: confirmed, the relayer had not said how it ended",
        (Some(_), ..) => "end: failed",
        (None, ..) => "end: none",
    }];
    let passed = [
        ("submitted", "it answered", "bound by the relayer's answer"),
        ("submitted", "found in its list", "bound: found in the relayer's list"),
        ("submitted", "chain:", "bound: found on the chain"),
        ("outcome-unknown", "", "had an unknown outcome"),
        ("outcome-unknown", "its consumer", "its consumer was killed"),
        ("absent", "", "sent again after proven absence"),
        ("rerouted", "certainly did not execute", "re-routed: the chain proves that it was not done"),
        ("rerouted", "failed it unsigned", "re-routed: failed unsigned"),
        ("forgotten", "", "forgotten by its relayer"),
        ("double-send", "", "double-send alarm"),
        ("unverified", "", "marked unverified"),
        ("webhook-ignored", "", "a webhook was ignored"),
    ];
    ways.extend(passed.iter().filter(|(action, text, _)| step(action, text)).map(|(.., way)| *way));
    ways
}
