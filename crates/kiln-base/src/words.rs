//! Splits a command into words, as a shell would, without anything else that a shell does.

/// Splits at white space outside of quotes. `'…'` takes everything as it is; in `"…"` and outside of quotes a backslash
/// takes the next character as it is, except on Windows, whose paths have backslashes. Nothing is expanded.
pub(crate) fn split(text: &str) -> Result<Vec<String>, &'static str> {
    let (mut words, mut word, mut quote) = (Vec::new(), None::<String>, None);
    let mut characters = text.chars();
    while let Some(c) = characters.next() {
        match (quote, c) {
            (Some(q), c) if c == q => quote = None,
            (None, '\'' | '"') => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (None | Some('"'), '\\') if cfg!(not(windows)) => match characters.next() {
                Some(next) => word.get_or_insert_default().push(next),
                None => return Err("it ends with a backslash"),
            },
            (None, c) if c.is_whitespace() => words.extend(word.take()),
            (_, c) => word.get_or_insert_default().push(c),
        }
    }
    if quote.is_some() {
        return Err("a quote is not closed");
    }
    words.extend(word);
    Ok(words)
}

#[cfg(test)]
mod tests {
    use super::split;

    #[test]
    fn words_are_split_at_white_space_outside_of_quotes() {
        assert_eq!(split("  a b\tc\nd ").unwrap(), ["a", "b", "c", "d"]);
        assert_eq!(split("a 'b c' \"d 'e'\" ''").unwrap(), ["a", "b c", "d 'e'", ""]);
        assert_eq!(split("--x='1 2'y").unwrap(), ["--x=1 2y"]);
        assert!(split("").unwrap().is_empty());
        assert!(split("a 'b").is_err());
    }

    #[cfg(not(windows))]
    #[test]
    fn nothing_is_expanded() {
        assert_eq!(split(r"a\ b \'c 'd\'").unwrap(), ["a b", "'c", r"d\"]);
        assert_eq!(
            split("a $HOME `id` $(id) *; b && c | d > e").unwrap().concat(),
            "a$HOME`id`$(id)*;b&&c|d>e"
        );
        assert!(split("a\\").is_err());
    }
}
