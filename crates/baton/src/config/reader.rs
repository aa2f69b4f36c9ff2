//! Reads single variables by their row in the [table](super::variables) and collects every problem.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::str::FromStr;
use std::time::Duration;

use reqwest::Url;

use super::definition::Kind;
use super::placeholder::has_placeholder;
use super::variables;

pub(super) struct Vars<'a> {
    lookup: &'a dyn Fn(&str) -> Option<String>,
    problems: Vec<String>,
    /// Secrets that were read and hold a placeholder.
    placeholders: RefCell<BTreeSet<&'static str>>,
    /// Whether an API key may be short.
    pub(super) short_keys: bool,
}

impl<'a> Vars<'a> {
    pub(super) fn new(lookup: &'a dyn Fn(&str) -> Option<String>) -> Self {
        Self { lookup, problems: Vec::new(), placeholders: RefCell::default(), short_keys: false }
    }

    /// Everything that was wrong, in the order of reading. Of a placeholder nothing else is said: it is too short, or no
    /// URL, only because it is one.
    pub(super) fn into_problems(self) -> Vec<String> {
        let placeholders = self.placeholders.into_inner();
        let name = |problem: &String| problem.split(' ').next().unwrap_or_default().to_owned();
        let others = self.problems.into_iter().filter(|problem| !placeholders.contains(name(problem).as_str()));
        let copied =
            placeholders.iter().map(|name| format!("{name} is, or contains, a placeholder: set the real value"));
        others.chain(copied).collect()
    }

    /// The value of a variable that is set and not blank.
    pub(super) fn text(&self, name: &str) -> Option<String> {
        let variable = variables::variable(name);
        let text = self.raw(name);
        if variable.secret && text.as_ref().is_some_and(|text| has_placeholder(variable.kind, text)) {
            self.placeholders.borrow_mut().insert(variable.name);
        }
        text
    }

    fn raw(&self, name: &str) -> Option<String> {
        (self.lookup)(name).map(|text| text.trim().to_owned()).filter(|text| !text.is_empty())
    }

    pub(super) fn text_or_default(&self, name: &str) -> String {
        self.text(name).unwrap_or_else(|| variables::variable(name).default.to_owned())
    }

    /// Reports a problem; the message follows the variable's name.
    pub(super) fn problem(&mut self, name: &str, message: &str) {
        let problem = format!("{name} {message}");
        // Two settings may depend on one variable.
        if !self.problems.contains(&problem) {
            self.problems.push(problem);
        }
    }

    pub(super) fn has_problem(&self, name: &str) -> bool {
        self.problems.iter().any(|problem| problem.split(' ').next() == Some(name))
    }

    /// Parses a variable or its default. A value that `parse` refuses breaks the rule of the variable's kind.
    pub(super) fn read<T>(&mut self, name: &str, parse: impl Fn(&str) -> Option<T>) -> T {
        let variable = variables::variable(name);
        let value = match self.text(name) {
            None => None,
            Some(text) => {
                let value = parse(&text);
                if value.is_none() {
                    self.problem(name, &variable.kind.rule());
                }
                value
            }
        };
        value.or_else(|| parse(variable.default)).expect("a test reads every default")
    }

    pub(super) fn parsed<T: FromStr>(&mut self, name: &str) -> T {
        self.read(name, |text| text.parse().ok())
    }

    /// A whole number of at least 1.
    pub(super) fn count<T: TryFrom<u64>>(&mut self, name: &str) -> T {
        self.read(name, |text| T::try_from(text.parse::<u64>().ok().filter(|number| *number > 0)?).ok())
    }

    /// The same for a variable without a default; `None` if it is unset.
    pub(super) fn optional_count(&mut self, name: &str) -> Option<u64> {
        let text = self.text(name)?;
        let count = text.parse::<u64>().ok().filter(|number| *number > 0);
        if count.is_none() {
            self.problem(name, &variables::variable(name).kind.rule());
        }
        count
    }

    pub(super) fn millis(&mut self, name: &str) -> Duration {
        Duration::from_millis(self.count(name))
    }

    /// One of the words of a [`Kind::Choice`]; `None` if the variable is unset and has no default.
    pub(super) fn choice(&mut self, name: &str) -> Option<&'static str> {
        let variable = variables::variable(name);
        let Kind::Choice(words) = variable.kind else { return None };
        let word = |text: &str| words.iter().copied().find(|word| *word == text);
        let chosen = self.text(name).map(|text| word(&text));
        if chosen == Some(None) {
            self.problem(name, &variable.kind.rule());
        }
        chosen.flatten().or_else(|| word(variable.default))
    }

    pub(super) fn required_url(&mut self, name: &str, why: &str) -> Option<Url> {
        if self.text(name).is_none() {
            self.problem(name, &format!("is not set: {why}"));
        }
        self.url(name)
    }

    /// A URL of the schemes that the table names. It may hold a password, so problems do not quote it.
    pub(super) fn url(&mut self, name: &str) -> Option<Url> {
        let text = self.text(name)?;
        let kind = variables::variable(name).kind;
        let Kind::Url(schemes) = kind else { return None };
        let url = Url::parse(&text).ok().filter(|url| schemes.contains(&url.scheme()) && url.has_host());
        if url.is_none() {
            self.problem(name, &kind.rule());
        }
        url
    }

    /// One or more such URLs, separated by commas, as they were written.
    pub(super) fn urls(&mut self, name: &str) -> Option<String> {
        let kind = variables::variable(name).kind;
        let Kind::Url(schemes) = kind else { return None };
        let text = self.text(name)?;
        let fits = |url: &String| Url::parse(url).is_ok_and(|url| schemes.contains(&url.scheme()) && url.has_host());
        let urls = self.list(name);
        if urls.is_empty() || !urls.iter().all(fits) {
            self.problem(name, &kind.rule());
            return None;
        }
        Some(text)
    }

    /// The items of a list, separated by commas; blank ones do not count.
    pub(super) fn list(&self, name: &str) -> Vec<String> {
        let text = self.text(name).unwrap_or_default();
        text.split(',').map(str::trim).filter(|item| !item.is_empty()).map(str::to_owned).collect()
    }

    /// A warning for each variable that is set although this version no longer reads it.
    pub(super) fn removed(&self) -> Vec<String> {
        let set = variables::REMOVED.iter().filter(|(name, _)| self.raw(name).is_some());
        set.map(|(name, instead)| format!("{name} is set but no longer read: {instead}")).collect()
    }
}
