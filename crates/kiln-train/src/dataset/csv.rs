//! Comma-separated values: quoted fields, doubled quotes, line breaks inside quotes (RFC 4180). Where numbers have commas,
//! spreadsheets write semicolons instead.

/// Splits a text into records. The error names the line that a quote is opened in and not closed.
pub(super) fn records(text: &str) -> Result<Vec<Vec<String>>, usize> {
    let (mut records, mut record, mut field) = (Vec::new(), Vec::new(), String::new());
    let separator = separator(text);
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
            _ if character == separator => record.push(std::mem::take(&mut field)),
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

/// What separates fields: what the first line, which has the names of the columns, has most of.
fn separator(text: &str) -> char {
    let names = text.lines().next().unwrap_or_default();
    let count = |separator: char| names.matches(separator).count();
    // The first of several: a comma, unless another is there more often.
    [',', ';', '\t'].into_iter().rev().max_by_key(|separator| count(*separator)).unwrap_or(',')
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
    fn semicolons_and_tabs_of_spreadsheets_separate_fields() {
        for separator in [";", "\t"] {
            let text = ["file_name", "text\na.png", "\"a, b; c\""].join(separator);
            assert_eq!(records(&text).unwrap(), [["file_name", "text"], ["a.png", "a, b; c"]]);
        }
        assert_eq!(records("file_name\na;b.png").unwrap(), [["file_name"], ["a;b.png"]]);
    }

    #[test]
    fn a_quote_that_is_not_closed_is_reported_with_its_line() {
        assert_eq!(records("a,b\nc,\"d\ne"), Err(2));
    }
}
