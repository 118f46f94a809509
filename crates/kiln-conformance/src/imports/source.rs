//! A minimal parser for a Rust file: its items, imports and paths, without tests.

use std::collections::HashSet;

/// What a file defines and names.
#[derive(Debug, Default)]
pub(super) struct SourceFile {
    /// Names of its items, without modules in other files.
    pub items: HashSet<String>,
    pub imports: Vec<Import>,
    /// Paths in its code; `a::b::C` is three names.
    pub paths: Vec<Vec<String>>,
    /// All names in its code outside of `use`.
    pub words: HashSet<String>,
    /// Modules in other files that are tests.
    pub tests: HashSet<String>,
}

/// One imported name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Import {
    pub path: Vec<String>,
    /// Its name in this file; `*` for a glob import.
    pub name: String,
    pub public: bool,
}

/// Splits code into names and punctuation characters, without comments, strings and character literals.
fn tokens(text: &str) -> Vec<String> {
    let mut rest = text;
    let mut tokens = Vec::new();
    while let Some(c) = rest.chars().next() {
        let after = &rest[c.len_utf8()..];
        let raw_string = rest.starts_with("r\"") || rest.starts_with("r#\"") || rest.starts_with("br\"");
        rest = if rest.starts_with("//") {
            rest.split_once('\n').map_or("", |(_, rest)| rest)
        } else if rest.starts_with("/*") {
            rest.split_once("*/").map_or("", |(_, rest)| rest)
        } else if raw_string {
            let hash = rest.starts_with("r#");
            let (_, body) = rest.split_once('"').unwrap_or_default();
            body.split_once(if hash { "\"#" } else { "\"" }).map_or("", |(_, rest)| rest)
        } else if c == '"' {
            after_string(after)
        } else if c == '\'' {
            after_quote(after)
        } else if c.is_alphanumeric() || c == '_' {
            let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
            tokens.push(rest[..end].to_string());
            &rest[end..]
        } else {
            if !c.is_whitespace() {
                tokens.push(c.to_string());
            }
            after
        };
    }
    tokens
}

/// Returns the text after a string literal.
fn after_string(text: &str) -> &str {
    let mut escaped = false;
    let end = text.find(|c| {
        let ends = c == '"' && !escaped;
        escaped = c == '\\' && !escaped;
        ends
    });
    end.map_or("", |end| &text[end + 1..])
}

/// Returns the text after a character literal, or after the quote of a lifetime.
fn after_quote(text: &str) -> &str {
    let mut chars = text.chars();
    match (chars.next(), chars.next()) {
        (Some('\\'), Some(escaped)) => {
            let rest = &text[1 + escaped.len_utf8()..];
            rest.split_once('\'').map_or("", |(_, rest)| rest)
        }
        (Some(c), Some('\'')) => &text[c.len_utf8() + 1..],
        _ => text,
    }
}

/// Returns the end of the item that begins at `start`: after its `;` or its last bracket.
fn item_end(tokens: &[String], start: usize) -> usize {
    let mut depth = 0;
    for (i, token) in tokens.iter().enumerate().skip(start) {
        match token.as_str() {
            "{" | "(" | "[" => depth += 1,
            ")" | "]" => depth -= 1,
            "}" => {
                depth -= 1;
                if depth == 0 {
                    return i + 1;
                }
            }
            ";" if depth == 0 => return i + 1,
            _ => {}
        }
    }
    tokens.len()
}

const ITEM_KEYWORDS: [&str; 10] =
    ["struct", "enum", "union", "trait", "type", "fn", "const", "static", "mod", "macro_rules"];

impl SourceFile {
    pub fn parse(text: &str) -> SourceFile {
        let tokens = tokens(text);
        let at = |i: usize| tokens.get(i).map_or("", String::as_str);
        let (mut source, mut i, mut depth) = (SourceFile::default(), 0, 0usize);
        while i < tokens.len() {
            if tokens[i..].starts_with(&["#", "[", "cfg", "(", "test", ")", "]"].map(String::from)) {
                let end = item_end(&tokens, i + 7);
                if at(i + 7) == "mod" && at(i + 9) == ";" {
                    source.tests.insert(at(i + 8).into());
                }
                i = end;
                continue;
            }
            match at(i) {
                "{" => depth += 1,
                "}" => depth = depth.saturating_sub(1),
                "use" => {
                    let end = i + tokens[i..].iter().take_while(|token| *token != ";").count();
                    // `pub use`, or the bracket of `pub(crate) use`.
                    let public = i > 0 && matches!(at(i - 1), "pub" | ")");
                    collect_imports(&tokens[i + 1..end], &mut Vec::new(), public, &mut source.imports);
                    i = end + 1;
                    continue;
                }
                kind if depth == 0 && ITEM_KEYWORDS.contains(&kind) => {
                    let name = if kind == "macro_rules" { at(i + 2) } else { at(i + 1) };
                    // A module in another file is not an item of this one.
                    if !(kind == "mod" && at(i + 2) == ";") {
                        source.items.insert(name.into());
                    }
                }
                _ => {}
            }
            let begins = i < 2 || at(i - 1) != ":" || at(i - 2) != ":";
            if begins && is_name(at(i)) && at(i + 1) == ":" && at(i + 2) == ":" {
                source.paths.push(path(&tokens[i..]));
            }
            source.words.insert(at(i).into());
            i += 1;
        }
        source
    }
}

fn is_name(token: &str) -> bool {
    token.starts_with(|c: char| c.is_alphabetic() || c == '_')
}

/// Returns the names of a path.
fn path(tokens: &[String]) -> Vec<String> {
    let mut path = vec![tokens[0].clone()];
    let mut rest = &tokens[1..];
    while let [a, b, name, ..] = rest
        && a == ":"
        && b == ":"
        && is_name(name)
    {
        path.push(name.clone());
        rest = &rest[3..];
    }
    path
}

/// Collects every name that a `use` tree imports.
fn collect_imports(tree: &[String], before: &mut Vec<String>, public: bool, found: &mut Vec<Import>) {
    let depth = before.len();
    let mut i = 0;
    while i < tree.len() {
        match tree[i].as_str() {
            ":" => i += 1,
            "{" => {
                let end = item_end(tree, i);
                let inner = &tree[i + 1..end - 1];
                let mut start = 0;
                let mut nested = 0;
                for (at, token) in inner.iter().enumerate() {
                    match token.as_str() {
                        "{" => nested += 1,
                        "}" => nested -= 1,
                        "," if nested == 0 => {
                            collect_imports(&inner[start..at], before, public, found);
                            start = at + 1;
                        }
                        _ => {}
                    }
                }
                collect_imports(&inner[start..], before, public, found);
                before.truncate(depth);
                return;
            }
            "*" => {
                found.push(Import { path: before.clone(), name: "*".into(), public });
                before.truncate(depth);
                return;
            }
            "as" => {
                found.push(Import { path: before.clone(), name: tree[i + 1].clone(), public });
                before.truncate(depth);
                return;
            }
            // `{self, …}` is the module itself.
            "self" if depth > 0 => i += 1,
            name => {
                before.push(name.into());
                i += 1;
            }
        }
    }
    if let Some(name) = before.last().filter(|_| !tree.is_empty()).cloned() {
        found.push(Import { path: before.clone(), name, public });
    }
    before.truncate(depth);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(text: &str) -> Vec<(String, String)> {
        SourceFile::parse(text).imports.into_iter().map(|u| (u.path.join("::"), u.name)).collect()
    }

    #[test]
    fn use_trees_are_flattened() {
        let found = names("use crate::a::{self, b::{C, D as E}, f::*}; pub(crate) use super::g;");
        let expected = [
            ("crate::a", "a"),
            ("crate::a::b::C", "C"),
            ("crate::a::b::D", "E"),
            ("crate::a::f", "*"),
            ("super::g", "g"),
        ];
        assert_eq!(found, expected.map(|(path, name)| (path.to_string(), name.to_string())));
    }

    #[test]
    fn comments_strings_and_tests_are_ignored() {
        let source = SourceFile::parse(
            "// crate::a::B\n/* crate::b::C */ fn f<'a>(x: &'a str) { g(\"crate::c::D \\\" crate::e\", '\\'', crate::h::I) }\n\
             #[cfg(test)] mod tests { use crate::j::K; } #[cfg(test)] mod other;",
        );
        assert_eq!(source.paths, [["crate", "h", "I"]]);
        assert!(source.imports.is_empty());
        assert!(source.items.contains("f") && source.tests.contains("other"));
    }
}
