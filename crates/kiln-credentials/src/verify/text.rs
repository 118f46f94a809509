//! Texts of strangers.

/// Maximum characters of a text in a report.
const MAX_TEXT: usize = 200;

/// A text of a stranger's: cut, without control characters and marks that turn what follows around.
pub(super) fn text(text: &str) -> String {
    let is_plain = |character: &char| {
        let turns =
            matches!(character, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
        !character.is_control() && !turns
    };
    text.chars().filter(is_plain).take(MAX_TEXT).collect()
}
