//! Text from files for a terminal: a name or a recipe must not move the cursor, change colours or reorder a line.

use std::borrow::Cow;

/// Escapes what a terminal acts upon: control characters and marks that reorder text become `\u{1b}` and the like.
///
/// Line breaks and tabs stay; for text that must be one line see [`printable_line`].
///
/// ```
/// assert_eq!(kiln_base::printable("a\u{1b}[31mred\r\nb"), "a\\u{1b}[31mred\nb");
/// ```
pub fn printable(text: &str) -> Cow<'_, str> {
    escape(text, |c| c != '\n')
}

/// [`printable`] for text that must be one line: escapes line breaks, too.
pub fn printable_line(text: &str) -> Cow<'_, str> {
    escape(text, |_| true)
}

/// Cuts absolute paths in `` `quotes` `` down to their last part: a message for other machines tells nothing about this
/// one's folders.
///
/// ```
/// assert_eq!(kiln_base::without_folders("can't read `/srv/kiln/a.png`"), "can't read `a.png`");
/// ```
pub fn without_folders(text: &str) -> Cow<'_, str> {
    let (mut out, mut rest) = (String::new(), text);
    while let Some(at) = rest.find(['`', '"']) {
        let (before, quoted) = rest.split_at(at + 1);
        out.push_str(before);
        rest = quoted;
        let path =
            before.chars().next_back().and_then(|quote| quoted.split_once(quote)).map(|(path, _)| path);
        let name = path
            .map(std::path::Path::new)
            .filter(|path| leads_to_a_file(path))
            .and_then(|path| path.file_name());
        if let (Some(path), Some(name)) = (path, name) {
            out.push_str(&name.to_string_lossy());
            rest = &quoted[path.len()..];
            // The closing quote opens nothing.
            out.push_str(&rest[..1]);
            rest = &rest[1..];
        }
    }
    out.push_str(rest);
    if out == text { Cow::Borrowed(text) } else { Cow::Owned(out) }
}

/// Whether a quoted text is the path of a file or folder, and not a name with a slash, as LoRAs in subfolders have.
fn leads_to_a_file(path: &std::path::Path) -> bool {
    const FILES: [&str; 10] =
        ["safetensors", "gguf", "json", "jinja", "txt", "toml", "png", "jpg", "webp", "sqlite"];
    let extension = path.extension().and_then(|extension| extension.to_str());
    // On Windows, a path without a drive is not absolute.
    path.has_root()
        || path.starts_with(".")
        || path.starts_with("..")
        || (path.components().count() > 1 && extension.is_some_and(|extension| FILES.contains(&extension)))
}

fn escape(text: &str, escapes: impl Fn(char) -> bool) -> Cow<'_, str> {
    let unsafe_here = |c: char| is_unsafe(c) && escapes(c);
    if !text.contains(unsafe_here) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 8);
    let mut rest = text.chars().peekable();
    while let Some(c) = rest.next() {
        if c == '\r' && rest.peek() == Some(&'\n') && !escapes('\n') {
            // A line break of Windows.
            continue;
        }
        if unsafe_here(c) { out.extend(c.escape_unicode()) } else { out.push(c) }
    }
    Cow::Owned(out)
}

fn is_unsafe(c: char) -> bool {
    let separates_lines = matches!(c, '\u{2028}' | '\u{2029}');
    // Embeddings, overrides and isolates of the bidirectional algorithm.
    let reorders = matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' | '\u{200e}' | '\u{200f}');
    c != '\t' && (c.is_control() || separates_lines || reorders)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_are_cut_off_in_every_kind_of_quotes() {
        let without = |text| without_folders(text).into_owned();
        assert_eq!(without("`a` and `/srv/b.png`, `c/d`"), "`a` and `b.png`, `c/d`");
        assert_eq!(
            without("`data/jobs.sqlite`, `../x/y` and `styles/wax.v2`"),
            "`jobs.sqlite`, `y` and `styles/wax.v2`"
        );
        // As the crate `tempfile` writes them.
        assert_eq!(without("gone at path \"/srv/.kiln-x.tmp\" (2)"), "gone at path \".kiln-x.tmp\" (2)");
        for same in ["", "`", "\"/", "`/`", "a `b", "it's \"a\" `b`", "1/2"] {
            assert_eq!(without(same), same);
        }
    }

    #[test]
    fn ordinary_text_is_not_copied() {
        for text in ["", "a red fox", "雪の中の狐 ñ é 🦊", "a\tb"] {
            assert!(matches!(printable_line(text), Cow::Borrowed(same) if same == text));
        }
        assert!(matches!(printable("one\ntwo"), Cow::Borrowed(_)));
    }

    #[test]
    fn folders_of_quoted_paths_are_cut_off() {
        let text = "tensor `a/b` in `/srv/m/x.safetensors` and `/srv/m`: 3/4 `/` of /srv";
        assert_eq!(without_folders(text), "tensor `a/b` in `x.safetensors` and `m`: 3/4 `/` of /srv");
        for same in ["", "plain", "`styles/ink`", "one ` quote", "/srv/a `b` /srv/c"] {
            assert!(matches!(without_folders(same), Cow::Borrowed(text) if text == same), "{same}");
        }
        #[cfg(windows)]
        assert_eq!(without_folders(r"`C:\m\x.gguf`, `\\?\C:\m\y`, `a\z.png`"), "`x.gguf`, `y`, `z.png`");
    }

    #[test]
    fn control_characters_and_reordering_marks_are_escaped() {
        assert_eq!(printable("\u{1b}]0;title\u{7}"), "\\u{1b}]0;title\\u{7}");
        assert_eq!(printable("\u{9b}2J\u{7f}\0\rback"), "\\u{9b}2J\\u{7f}\\u{0}\\u{d}back");
        assert_eq!(printable("gnp.\u{202e}exe"), "gnp.\\u{202e}exe");
    }

    #[test]
    fn line_breaks_stay_unless_it_must_be_one_line() {
        assert_eq!(printable("a\r\nb\nc\u{1b}"), "a\nb\nc\\u{1b}");
        assert_eq!(printable_line("a\nhint: b"), "a\\u{a}hint: b");
    }
}
