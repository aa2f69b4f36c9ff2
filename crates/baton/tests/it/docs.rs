//! The commands of the documentation, as they are copied into a terminal.

use std::path::{Path, PathBuf};

/// `README.md` and all pages below `docs/` and `deploy/`.
fn pages() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let (mut pages, mut folders) = (vec![root.join("README.md")], vec![root.join("docs"), root.join("deploy")]);
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "md") {
                pages.push(path);
            }
        }
    }
    pages
}

/// Answers have no newline at their end: two in a row made one line.
#[test]
fn every_curl_ends_its_answer_with_a_newline() {
    let (mut found, mut wrong) = (0, Vec::new());
    for page in pages() {
        let text = std::fs::read_to_string(&page).unwrap();
        for (index, line) in text.lines().enumerate().filter(|(_, line)| line.contains("curl -")) {
            found += 1;
            if !line.contains(r"-w '\n'") {
                wrong.push(format!("{}:{}: {line}", page.display(), index + 1));
            }
        }
    }
    assert!(found > 20, "{found} commands");
    assert!(wrong.is_empty(), "without -w '\\n':\n{}", wrong.join("\n"));
}
