//! The settings of the logs.

use super::vars::Vars;

/// Format and level of the logs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogConfig {
    /// `LOG_FORMAT`: JSON lines, or text for people.
    pub json: bool,
    /// `LOG_LEVEL`: a level, or directives per module. The logger refuses what it cannot parse.
    pub level: String,
}

impl Vars<'_> {
    pub(super) fn log(&mut self) -> LogConfig {
        LogConfig { json: self.choice("LOG_FORMAT") == Some("json"), level: self.text_or_default("LOG_LEVEL") }
    }
}
