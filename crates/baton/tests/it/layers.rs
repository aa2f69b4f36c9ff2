//! Imports inside the product point one way. Each file belongs to a layer; a file may import its own layer and those
//! below, never one above, and the lanes never import each other.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// The layers, lowest first. A file belongs to the entry with the longest matching path.
const LAYERS: &[&[&str]] = &[
    &["errors", "evm", "mutations", "timestamp"],
    &["clock", "randomness"],
    &["config"],
    &["telemetry", "queues", "servers", "store_pool", "dead_letters"],
    &["http"],
    // Lane 1.
    &["relay/request"],
    &["relay/state"],
    &["relay/store"],
    &["relay/chain"],
    &["relay/relayer"],
    &["relay/update"],
    &["relay/observe"],
    &["relay/submit"],
    &["relay/reconcile"],
    &["relay/accept"],
    &["relay/engine", "relay/health"],
    &["relay/lane", "relay"],
    // Client notifications, of the relay lane's events.
    &["notify/lookups"],
    &["notify/signature", "notify/address_guard", "notify/schedule", "notify/host_breaker"],
    &["notify/connections"],
    &["notify/endpoint_request", "notify/endpoint_change", "notify/endpoint_view"],
    &["notify/sender"],
    &["notify/outbox_queue"],
    &["notify/delivery", "notify/api"],
    &["notify/notifier", "notify"],
    // Lane 2.
    &["users/user", "users/quarantined_message"],
    &["users/store"],
    &["users/intake"],
    &["users/consumer", "users/dead_letters", "users/dead_letter_consumer"],
    &["users/api", "users/bulk", "users/health"],
    &["users/engine"],
    &["users/lane", "users"],
    // Wiring.
    &["cli"],
    &["lib", "main"],
];

#[test]
fn no_folder_imports_one_above_it() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let modules = modules_below(&source);
    let mut wrong = BTreeSet::new();
    for file in files_below(&source) {
        let text = std::fs::read_to_string(&file).unwrap();
        let module = module_of(file.strip_prefix(&source).unwrap());
        wrong.extend(upward_imports(&module, &text, &modules));
    }
    assert!(wrong.is_empty(), "imports against the arrows:\n{}", wrong.into_iter().collect::<Vec<_>>().join("\n"));
}

#[test]
fn a_planted_upward_import_is_found() {
    let modules = ["http/problem", "relay/state/moves", "relay/submit/consumer", "users/store/sqlite", "cli/dev"];
    let modules: BTreeSet<String> = modules.into_iter().map(str::to_owned).collect();
    let found = |module: &str, text: &str| upward_imports(module, text, &modules).len();
    assert_eq!(found("http/problem", "use crate::relay::state::moves::X;"), 1, "a lane is above http");
    assert_eq!(found("relay/state/moves", "fn f() { crate::relay::submit::consumer::run() }"), 1);
    assert_eq!(found("relay/state/moves", "use super::super::submit::consumer::Consumer;"), 1);
    assert_eq!(found("relay/submit/consumer", "use crate::users::store::sqlite::S;"), 1, "the lanes are apart");
    assert_eq!(found("users/store/sqlite", "use crate::relay::state::moves::X;"), 1, "the lanes are apart");
    assert_eq!(found("relay/submit/consumer", "use crate::relay::state::moves::X;\nuse crate::http::problem::P;"), 0);
    assert_eq!(found("relay/state/moves", "//! [`crate::cli::dev`]\n/// [`crate::cli::dev`] runs it."), 0, "a link");
    assert_eq!(found("new_folder/file", "use crate::http::problem::P;"), 1, "a module needs a place in LAYERS");
}

/// Every import of a layer above the module's own, as a sentence.
fn upward_imports(module: &str, text: &str, modules: &BTreeSet<String>) -> Vec<String> {
    let Some(own) = layer(module) else {
        return vec![format!("{module}: has no place in LAYERS of tests/it/layers.rs")];
    };
    let mut wrong = Vec::new();
    for line in text.lines().filter(|line| !line.trim_start().starts_with("//")) {
        for imported in imports(module, line, modules) {
            let across = lane(module).zip(lane(&imported)).is_some_and(|(own, other)| own != other);
            match layer(&imported) {
                Some(other) if other <= own && !across => {}
                Some(_) => wrong.push(format!("{module} imports {imported}: {}", line.trim())),
                None => wrong.push(format!("{imported}, imported by {module}, has no place in LAYERS")),
            }
        }
    }
    wrong
}

/// The modules that a line names by `crate::` or `super::` paths.
fn imports(module: &str, line: &str, modules: &BTreeSet<String>) -> Vec<String> {
    let mut found = Vec::new();
    for root in ["crate::", "super::"] {
        let mut rest = line;
        while let Some(at) = rest.find(root) {
            let before = rest[..at].chars().next_back();
            let mut path = &rest[at..];
            rest = &rest[at + root.len()..];
            // `super::super::x` is read from its first `super`; `$crate` and `a::super` are none.
            if before.is_some_and(|letter| letter.is_alphanumeric() || "_:$".contains(letter)) {
                continue;
            }
            let mut parts: Vec<&str> = Vec::new();
            if root == "super::" {
                parts = module.split('/').collect();
                while let Some(after) = path.strip_prefix("super::") {
                    parts.pop();
                    path = after;
                }
                // A glob in a test module: it means the file that the module is in.
                if path.starts_with('*') {
                    continue;
                }
            } else {
                path = &path[root.len()..];
            }
            let names = path.split("::").map(|name| name.trim_end_matches(|letter: char| !letter.is_alphanumeric()));
            for name in names {
                let name = name.split(|letter: char| !letter.is_alphanumeric() && letter != '_').next().unwrap_or("");
                parts.push(name);
                if !is_module(&parts.join("/"), modules) {
                    parts.pop();
                    break;
                }
            }
            if !parts.is_empty() {
                found.push(parts.join("/"));
            }
        }
    }
    found
}

/// Whether a path names a module: a file, or a folder with files.
fn is_module(path: &str, modules: &BTreeSet<String>) -> bool {
    modules.contains(path) || modules.iter().any(|module| module.starts_with(&format!("{path}/")))
}

fn layer(module: &str) -> Option<usize> {
    let matches = |entry: &str| module == entry || module.starts_with(&format!("{entry}/"));
    let entries =
        LAYERS.iter().enumerate().flat_map(|(layer, entries)| entries.iter().map(move |entry| (layer, *entry)));
    entries.filter(|(_, entry)| matches(entry)).max_by_key(|(_, entry)| entry.len()).map(|(layer, _)| layer)
}

fn lane(module: &str) -> Option<&str> {
    module.split('/').next().filter(|first| ["relay", "users"].contains(first))
}

/// `relay/store/mod.rs` is the module `relay/store`.
fn module_of(file: &Path) -> String {
    let text = file.with_extension("").to_string_lossy().into_owned();
    text.strip_suffix("/mod").map(str::to_owned).unwrap_or(text)
}

fn modules_below(source: &Path) -> BTreeSet<String> {
    files_below(source).iter().map(|file| module_of(file.strip_prefix(source).unwrap())).collect()
}

fn files_below(folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files.extend(files_below(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    files
}
