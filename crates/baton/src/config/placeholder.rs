//! Texts that stand for a secret in documentation and example files (pure). One that was copied as it is would be taken for
//! the secret, and refused by the other side at the first call, or known to everyone.

use super::definition::Kind;

/// How a placeholder begins, in lower case and without punctuation.
const BEGINNINGS: [&str; 8] =
    ["changeme", "replaceme", "replacethis", "replacewith", "enteryour", "insertyour", "putyour", "placeholder"];
/// How one ends that begins with "your".
const ENDS_OF_YOURS: [&str; 5] = ["key", "secret", "token", "password", "here"];
/// Whole words. A part of a path may be one of them.
const WORDS: [&str; 4] = ["todo", "tbd", "fixme", "undefined"];

/// Whether the value of a variable of this kind is a placeholder, or has one in place of a secret.
pub(super) fn has_placeholder(kind: Kind, value: &str) -> bool {
    match kind {
        Kind::Url(_) => value.split(',').any(has_placeholder_in_url),
        Kind::List => value.split(',').any(|item| match item.split_once("://") {
            // A key for one URL only.
            Some((_, rest)) => rest.split_once('=').is_some_and(|(_, key)| is_placeholder(key)),
            None => is_placeholder(item),
        }),
        _ => is_placeholder(value),
    }
}

/// Looks at the raw text: parsing would escape what is not allowed in a URL.
fn has_placeholder_in_url(url: &str) -> bool {
    let (_, rest) = url.split_once("://").unwrap_or(("", url));
    let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
    let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
    let password = authority.rsplit_once('@').and_then(|(user, _)| user.split_once(':')).map(|(_, password)| password);
    let values = query.split('&').filter_map(|pair| pair.split_once('=')).map(|(_, value)| value);
    password.into_iter().chain(values).any(is_placeholder)
        || path.split('/').any(|part| is_blank(part) || is_request(&plain(part)))
}

fn is_placeholder(text: &str) -> bool {
    let plain = plain(text);
    is_blank(text) || is_request(&plain) || WORDS.contains(&plain.as_str())
}

/// Whether it is a blank to be filled in: `…`, `xxxx`, `<key>`, `${KEY}`.
fn is_blank(text: &str) -> bool {
    let text = text.trim().trim_matches(['"', '\'']);
    let is_between = |begin, end| text.len() > 2 && text.starts_with(begin) && text.ends_with(end);
    text.contains('…')
        || text.starts_with("...")
        || text.ends_with("...")
        || is_between("<", ">")
        || is_between("${", "}")
        || is_between("{{", "}}")
        || (text.len() >= 3 && text.chars().all(|char| matches!(char, 'x' | 'X' | '*' | '?' | '#' | '.' | '-' | '_')))
}

/// Whether it asks for a secret: `changeme`, `your-api-key`.
fn is_request(plain: &str) -> bool {
    BEGINNINGS.iter().any(|beginning| plain.starts_with(beginning))
        || (plain.starts_with("your") && ENDS_OF_YOURS.iter().any(|end| plain.ends_with(end)))
}

fn plain(text: &str) -> String {
    text.chars().filter(char::is_ascii_alphanumeric).map(|char| char.to_ascii_lowercase()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const URL: Kind = Kind::Url(&["https", "mysql"]);

    #[test]
    fn blanks_and_requests_are_placeholders() {
        for text in [
            "…",
            "...",
            "'…'",
            "whsec_…",
            "sk-...",
            "<your key>",
            "${RELAYER_KEY}",
            "{{ key }}",
            "xxx",
            "XXXX-XXXX",
            "****",
            "changeme",
            "CHANGE_ME",
            "change-me-to-a-key-of-at-least-32-characters",
            "your-api-key",
            "YOUR_SECRET_HERE",
            "replace-with-32-characters",
            "todo",
            "Placeholder",
        ] {
            assert!(has_placeholder(Kind::Text, text), "{text}");
            assert!(has_placeholder(Kind::List, &format!("0123456789abcdef, {text}")), "{text} in a list");
            assert!(has_placeholder(Kind::List, &format!("http://a:1={text}")), "{text} for one URL");
        }
        for url in [
            "mysql://baton:…@db:3306/baton",
            "mysql://baton:changeme@db/baton",
            "https://mainnet.example/v3/<your-key>",
            "https://mainnet.example/v2/YOUR_API_KEY",
            "https://a.example/1,https://b.example/v3/...",
            "https://node.example/?token=todo",
        ] {
            assert!(has_placeholder(URL, url), "{url}");
        }
    }

    #[test]
    fn secrets_are_not() {
        for text in [
            "0123456789abcdef0123456789abcdef",
            "test",
            "dev-key",
            "secret",
            "x",
            "any",
            "none",
            "a.b..c",
            "x-y-z",
            "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
            "yourself-0123456789",
            "Baton-1-ab12",
            "<half",
            "todo-0123456789",
        ] {
            assert!(!has_placeholder(Kind::Text, text), "{text}");
            assert!(!has_placeholder(Kind::List, &format!("http://a:1={text},{text}")), "{text} in a list");
        }
        for url in [
            "mysql://user:password@host:3306/todo",
            "https://mainnet.example/v3/0123456789abcdef",
            "https://node.example:8545",
            "mysql://baton@[::1]/x",
        ] {
            assert!(!has_placeholder(URL, url), "{url}");
        }
    }
}
