//! The table of variables as text: `.env.example`, the services' help, and the tables of the documentation page.
//!
//! `baton config env-example` and `baton config docs` write the files; the tests below compare them.

use std::fmt::Write;

use super::Service;
use super::table::{SECTIONS, Section, variables};
use super::variable::Variable;

/// The text of `.env.example`.
pub fn env_example() -> String {
    let mut text = "# Every variable with its default. `baton serve` requires the ones that are not commented out.\n\
        # Generated from the table in the code: cargo run -- config env-example > .env.example\n"
        .to_owned();
    for section in SECTIONS {
        line(&mut text, format_args!("\n#: {}", section.title));
        for variable in shown(section) {
            line(&mut text, format_args!("\n#: {}.", variable.about));
            let comment = if variable.required { "" } else { "# " };
            line(&mut text, format_args!("{comment}{}={}", variable.name, variable.default));
        }
    }
    text
}

/// The section "Environment" of a service's help: the variables that the service reads.
pub fn help(service: Service) -> String {
    let mut text = "Environment (details: docs/operations/configuration.md):\n".to_owned();
    for section in SECTIONS {
        let read: Vec<_> = shown(section).filter(|variable| variable.read_by.include(service)).collect();
        if !read.is_empty() {
            line(&mut text, format_args!("\n  {}:", section.title));
        }
        for variable in read {
            let port = service.port().to_string();
            let default = if variable.name == "PORT" { &port } else { variable.default };
            let note = match (variable.required, default) {
                (true, _) => " (required)".to_owned(),
                (false, "") => String::new(),
                (false, default) => format!(" [default: {default}]"),
            };
            line(&mut text, format_args!("    {}{note}\n        {}", variable.name, variable.about));
        }
    }
    text.trim_end().to_owned()
}

/// The documentation page with each block between `<!-- variables: KEY -->` and `<!-- end -->` written anew. KEY is a
/// section of the table, `secrets` or `tests`. The error names a block that is unknown, unfinished or missing.
pub fn page(current: &str) -> Result<String, String> {
    let mut text = String::new();
    let mut written = Vec::new();
    let mut lines = current.lines();
    while let Some(current) = lines.next() {
        line(&mut text, format_args!("{current}"));
        let key = current.strip_prefix("<!-- variables: ").and_then(|rest| rest.strip_suffix(" -->"));
        let Some(key) = key else { continue };
        let block = block(key).ok_or_else(|| format!("the table has no section {key:?}"))?;
        text.push_str(&block);
        lines.find(|line| *line == "<!-- end -->").ok_or_else(|| format!("the block {key:?} has no end"))?;
        line(&mut text, format_args!("<!-- end -->"));
        written.push(key);
    }
    let keys = SECTIONS.iter().map(|section| section.key).chain(["secrets", "tests"]);
    match keys.into_iter().find(|key| !written.contains(key)) {
        Some(missing) => Err(format!("the page has no block {missing:?}")),
        None => Ok(text),
    }
}

fn block(key: &str) -> Option<String> {
    match key {
        "secrets" => Some(names(variables().filter(|variable| variable.secret && !variable.hidden))),
        "tests" => Some(names(variables().filter(|variable| variable.hidden))),
        _ => SECTIONS.iter().find(|section| section.key == key).map(markdown_table),
    }
}

fn markdown_table(section: &Section) -> String {
    let mut text = "| variable | type | default | read by | meaning |\n|---|---|---|---|---|\n".to_owned();
    for variable in shown(section) {
        let default = match (variable.required, variable.default) {
            (true, _) => "required",
            (false, "") => "-",
            (false, default) => default,
        };
        let Variable { name, kind, read_by, about, .. } = variable;
        let (kind, read_by) = (kind.name(), read_by.name());
        line(&mut text, format_args!("| `{name}` | {kind} | {default} | {read_by} | {about} |"));
    }
    text
}

/// The names as a sentence, wrapped like the rest of the page.
fn names(variables: impl Iterator<Item = &'static Variable>) -> String {
    const WIDTH: usize = 120;
    let mut lines = vec![String::new()];
    let names: Vec<_> = variables.map(|variable| format!("`{}`", variable.name)).collect();
    for (index, name) in names.iter().enumerate() {
        let end = if index + 1 < names.len() { "," } else { "." };
        let last = lines.last_mut().expect("there is a first line");
        let space = if last.is_empty() { "" } else { " " };
        if last.len() + space.len() + name.len() + end.len() > WIDTH {
            lines.push(format!("{name}{end}"));
        } else {
            write!(last, "{space}{name}{end}").expect("a String takes all text");
        }
    }
    lines.join("\n") + "\n"
}

fn shown(section: &Section) -> impl Iterator<Item = &'static Variable> {
    section.variables.iter().filter(|variable| !variable.hidden)
}

fn line(text: &mut String, content: std::fmt::Arguments<'_>) {
    writeln!(text, "{content}").expect("a String takes all text");
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

    #[test]
    fn the_example_file_is_the_table() {
        let file = std::fs::read_to_string(format!("{ROOT}/.env.example")).unwrap();
        assert!(file == env_example(), "rewrite it: cargo run -- config env-example > .env.example");
    }

    #[test]
    fn the_documentation_page_has_the_tables() {
        let file = std::fs::read_to_string(format!("{ROOT}/docs/operations/configuration.md")).unwrap();
        let page = page(&file).unwrap();
        assert!(file == page, "rewrite it: cargo run -- config docs docs/operations/configuration.md");
    }

    #[test]
    fn the_help_lists_what_the_service_reads() {
        let help = help(Service::UsersConsumer);
        assert!(help.contains("USERS_BATCH_SIZE [default: 1000]") && help.contains("PORT [default: 3003]"), "{help}");
        assert!(!help.contains("OZ_RELAYER_URLS") && !help.contains("RELAY_API_KEY"), "{help}");
        assert!(super::help(Service::Serve).contains("OZ_RELAYER_URLS (required)"));
    }

    #[test]
    fn a_page_with_a_missing_block_is_refused() {
        assert!(page("<!-- variables: logs -->").unwrap_err().contains("no end"));
        assert!(page("<!-- variables: weather -->\n<!-- end -->").unwrap_err().contains("weather"));
        assert!(page("# Configuration\n").unwrap_err().contains("service"));
    }
}
