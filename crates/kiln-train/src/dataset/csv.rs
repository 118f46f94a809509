//! Comma-separated values: quoted fields, doubled quotes, line breaks inside quotes (RFC 4180).

/// Splits a text into records. The error names the line that a quote is opened in and not closed.
pub(super) fn records(text: &str) -> Result<Vec<Vec<String>>, usize> {
    let (mut records, mut record, mut field) = (Vec::new(), Vec::new(), String::new());
    let (mut quoted, mut line, mut opened) = (false, 1, 1);
    let mut characters = text.chars().peekable();
    while let Some(character) = characters.next() {
        line += usize::from(character == '\n');
        match character {
            '"' if quoted && characters.peek() == Some(&'"') => {
                characters.next();
                field.push('"');
            }
            '"' if quoted => quoted = false,
            '"' if field.is_empty() => (quoted, opened) = (true, line),
            _ if quoted => field.push(character),
            ',' => record.push(std::mem::take(&mut field)),
            '\r' if characters.peek() == Some(&'\n') => {}
            '\n' => {
                record.push(std::mem::take(&mut field));
                records.push(std::mem::take(&mut record));
            }
            _ => field.push(character),
        }
    }
    if quoted {
        return Err(opened);
    }
    if !field.is_empty() || !record.is_empty() {
        record.push(field);
        records.push(record);
    }
    records.retain(|record| record.iter().any(|field| !field.trim().is_empty()));
    Ok(records)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotes_commas_and_line_breaks_are_part_of_a_quoted_field() {
        let text = "file_name,text\r\na.png,\"a \"\"red\"\" fox,\nin snow\"\r\n\r\nb.png,plain";
        let expected =
            vec![vec!["file_name", "text"], vec!["a.png", "a \"red\" fox,\nin snow"], vec!["b.png", "plain"]];
        assert_eq!(records(text).unwrap(), expected);
    }

    #[test]
    fn a_quote_that_is_not_closed_is_reported_with_its_line() {
        assert_eq!(records("a,b\nc,\"d\ne"), Err(2));
    }
}
