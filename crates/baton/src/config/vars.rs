//! Reads single variables and collects what is wrong with them.

use std::fmt;
use std::time::Duration;

use reqwest::Url;

use super::variables;

pub(super) struct Vars<'a> {
    pub(super) lookup: &'a dyn Fn(&str) -> Option<String>,
    pub(super) problems: Vec<String>,
}

impl Vars<'_> {
    /// A variable that is set and not blank.
    pub(super) fn text(&self, name: &str) -> Option<String> {
        (self.lookup)(name).map(|text| text.trim().to_owned()).filter(|text| !text.is_empty())
    }

    pub(super) fn problem(&mut self, name: &str, message: &str) {
        self.problems.push(format!("{name} {message}"));
    }

    pub(super) fn parsed<T: std::str::FromStr>(&mut self, name: &str, default: T, what: &str) -> T {
        match self.text(name).map(|text| text.parse()) {
            None => default,
            Some(Ok(value)) => value,
            Some(Err(_)) => {
                self.problem(name, &format!("must be {what}"));
                default
            }
        }
    }

    /// The default that the documentation shows.
    pub(super) fn default_number(name: &str) -> u64 {
        let variable = variables().find(|variable| variable.name == name);
        variable.and_then(|variable| variable.default.parse().ok()).unwrap_or(0)
    }

    pub(super) fn count<T: TryFrom<u64>>(&mut self, name: &str) -> T
    where
        T::Error: fmt::Debug,
    {
        let what = "a whole number of at least 1";
        let default = Self::default_number(name);
        let number: u64 = self.parsed(name, default, what);
        match T::try_from(number) {
            Ok(value) if number > 0 => value,
            _ => {
                self.problem(name, &format!("must be {what}"));
                T::try_from(default).expect("defaults fit")
            }
        }
    }

    pub(super) fn millis(&mut self, name: &str) -> Duration {
        let what = "a whole number of milliseconds, at least 1";
        let default = Self::default_number(name);
        let number: u64 = self.parsed(name, default, what);
        if number == 0 {
            self.problem(name, &format!("must be {what}"));
        }
        Duration::from_millis(number)
    }

    pub(super) fn required_url(&mut self, name: &str, schemes: &[&str], why: &str) -> Option<Url> {
        if self.text(name).is_none() {
            self.problem(name, &format!("is not set: {why}"));
        }
        self.url(name, schemes)
    }

    /// A URL of one of these schemes. It may hold a password and is not shown.
    pub(super) fn url(&mut self, name: &str, schemes: &[&str]) -> Option<Url> {
        let text = self.text(name)?;
        let url = Url::parse(&text).ok().filter(|url| schemes.contains(&url.scheme()) && url.has_host());
        if url.is_none() {
            self.problem(name, &format!("must be a URL that begins with {}://", schemes.join(":// or ")));
        }
        url
    }

    pub(super) fn list(&self, name: &str) -> Vec<String> {
        let text = self.text(name).unwrap_or_default();
        text.split(',').map(str::trim).filter(|item| !item.is_empty()).map(str::to_owned).collect()
    }
}
