//! Prompts from standard input and from a file.

use std::io::Read;
use std::path::Path;

use kiln_engine::Request;
use serde_json::{Map, Value};

use crate::error::CliError;

/// Largest prompt read from standard input, in bytes: far more than any model sees, and a bound for endless input.
const MAX_PROMPT: u64 = 1 << 20;
/// Largest file of prompts, in bytes.
const MAX_FILE: u64 = 64 << 20;

/// Reads a prompt of `-` from standard input. A prompt from a recipe is always literal.
pub fn read_standard_input(request: &mut Request) -> Result<(), CliError> {
    let mut piped = request.prompts.iter_mut().filter(|text| *text == "-");
    if let Some(text) = piped.next() {
        *text = standard_input()?;
        if piped.next().is_some() {
            return Err(CliError::usage("only one prompt can come from standard input, found `-` twice")
                .hint("give the other prompts as arguments"));
        }
    }
    Ok(())
}

fn standard_input() -> Result<String, CliError> {
    let error =
        |problem: String| CliError::new(format!("can't read the prompt from standard input: {problem}"));
    let mut bytes = Vec::new();
    let mut input = std::io::stdin().lock().take(MAX_PROMPT + 1);
    input.read_to_end(&mut bytes).map_err(|e| error(e.to_string()).hint("check the file"))?;
    if bytes.len() as u64 > MAX_PROMPT {
        return Err(error(format!("it is longer than {}", crate::values::bytes(MAX_PROMPT)))
            .hint("the models see about a page of text; shorten the prompt"));
    }
    let text =
        kiln_base::decode_text(bytes).map_err(|e| error(e.to_string()).hint("it must be UTF-8 text"))?;
    // Shells end the input with a newline that is not part of the prompt.
    let trimmed = text.strip_suffix('\n').map_or(text.as_str(), |t| t.strip_suffix('\r').unwrap_or(t));
    Ok(trimmed.to_owned())
}

/// The contents of a file of prompts.
#[derive(Debug, Default, PartialEq)]
pub struct PromptFile {
    /// Prompts without options.
    pub prompts: Vec<String>,
    /// All lines as fields of a request, if one of them has options.
    lines: Vec<Line>,
}

#[derive(Debug, PartialEq)]
struct Line {
    number: usize,
    fields: Map<String, Value>,
}

impl Line {
    /// What is wrong with the first wrong field, with the field's name.
    fn problem(&self) -> Option<String> {
        self.fields.iter().find_map(|(name, value)| {
            let alone = Map::from_iter([(name.clone(), value.clone())]);
            let problem = serde_json::from_value::<Request>(Value::Object(alone)).err()?.to_string();
            let is_named = problem.contains(&format!("`{name}`"));
            Some(if is_named { problem } else { format!("{name}: {problem}") })
        })
    }
}

impl PromptFile {
    /// Reads a file with a prompt or a JSON object on each line. Empty lines and comments (`#`) don't count.
    pub fn read(path: &Path) -> Result<PromptFile, CliError> {
        let shown = path.display();
        let error =
            |problem: String| CliError::new(format!("can't read the prompts of `{shown}`: {problem}"));
        let mut bytes = Vec::new();
        let file = kiln_base::open_input(path).map_err(|e| error(e.to_string()).hint("check the path"))?;
        file.take(MAX_FILE + 1).read_to_end(&mut bytes).map_err(|e| error(e.to_string()))?;
        if bytes.len() as u64 > MAX_FILE {
            return Err(error(format!("it is larger than {}", crate::values::bytes(MAX_FILE)))
                .hint("a file of prompts has one prompt per line"));
        }
        let text = kiln_base::decode_text(bytes)
            .map_err(|e| error(e.to_string()).hint("a file of prompts is UTF-8 text, one prompt per line"))?;
        let file = PromptFile::parse(&text).map_err(|(line, problem)| {
            error(format!("line {line}: {problem}"))
                .hint(r#"a line is a prompt, or JSON such as {"prompt": "a fox", "seed": 7}"#)
        })?;
        if file.prompts.is_empty() && file.lines.is_empty() {
            return Err(error("it has no prompt".into()).hint("write one prompt per line"));
        }
        Ok(file)
    }

    /// Parses the text; an error has the number of its line.
    fn parse(text: &str) -> Result<PromptFile, (usize, String)> {
        let mut lines = Vec::new();
        let mut has_options = false;
        for (i, line) in text.lines().map(str::trim).enumerate() {
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let number = i + 1;
            let is_json = line.strip_prefix('{').is_some_and(|rest| rest.trim_start().starts_with('"'));
            let fields = if is_json {
                has_options = true;
                let mut fields: Map<String, Value> =
                    serde_json::from_str(line).map_err(|e| (number, format!("invalid JSON: {e}")))?;
                // As for the server, and as without a seed.
                fields.retain(|name, value| name != "seed" || value.as_i64() != Some(-1));
                let of_run =
                    ["model", "output_format", "png"].iter().find(|name| fields.contains_key(**name));
                if let Some(name) = of_run {
                    return Err((
                        number,
                        format!("`{name}` is the same for all prompts: choose it with an option"),
                    ));
                }
                fields
            } else {
                Map::from_iter([("prompt".to_owned(), line.into())])
            };
            lines.push(Line { number, fields });
        }
        if has_options {
            return Ok(PromptFile { prompts: Vec::new(), lines });
        }
        let prompts = lines.iter().filter_map(|line| line.fields["prompt"].as_str().map(str::to_owned));
        Ok(PromptFile { prompts: prompts.collect(), lines: Vec::new() })
    }

    /// Whether lines have options of their own.
    pub fn has_options(&self) -> bool {
        !self.lines.is_empty()
    }

    /// Returns the requests of a run: `base` itself, or `base` with the options of each line. Seeds continue from
    /// line to line.
    pub fn requests(&self, base: Request) -> Result<Vec<Request>, CliError> {
        if self.lines.is_empty() {
            return Ok(vec![base]);
        }
        let Ok(Value::Object(base_fields)) = serde_json::to_value(&base) else { return Ok(vec![base]) };
        let mut requests: Vec<Request> = Vec::with_capacity(self.lines.len());
        let mut images = 0;
        for line in &self.lines {
            let mut fields = base_fields.clone();
            fields.extend(line.fields.clone());
            let mut request: Request = serde_json::from_value(Value::Object(fields)).map_err(|e| {
                let problem = line.problem().unwrap_or_else(|| e.to_string());
                CliError::new(format!("line {} of the file of prompts: {problem}", line.number))
                    .hint("the fields of a line are those of a job of `kiln serve`")
            })?;
            if let ([first], false) = (&base.seed[..], line.fields.contains_key("seed")) {
                request.seed = vec![first.wrapping_add(images)];
            }
            images += request.image_count() as u64;
            requests.push(request);
        }
        Ok(requests)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_prompts_or_json() {
        let plain = PromptFile::parse("a fox\r\n\n# a comment\n  {red|blue} hen \n").unwrap();
        assert_eq!(plain.prompts, ["a fox", "{red|blue} hen"]);
        let file = PromptFile::parse("a fox\n{\"prompt\": \"a hen\", \"n\": 2, \"seed\": 9}\na cat").unwrap();
        let base = Request { seed: vec![5], steps: Some(3), ..Request::default() };
        let requests = file.requests(base).unwrap();
        let seeds: Vec<_> = requests.iter().map(|r| (&r.prompts[0][..], r.seed[0], r.n, r.steps)).collect();
        assert_eq!(
            seeds,
            [("a fox", 5, None, Some(3)), ("a hen", 9, Some(2), Some(3)), ("a cat", 8, None, Some(3))]
        );
    }

    #[test]
    fn files_of_powershell_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("prompts.txt");
        let text = "\u{feff}ein Käfer\r\n{\"prompt\": \"a hen\"}\r\n";
        std::fs::write(&path, text.encode_utf16().flat_map(u16::to_le_bytes).collect::<Vec<_>>()).unwrap();
        let requests = PromptFile::read(&path).unwrap().requests(Request::default()).unwrap();
        let prompts: Vec<&str> = requests.iter().map(|request| &*request.prompts[0]).collect();
        assert_eq!(prompts, ["ein Käfer", "a hen"]);
    }

    #[test]
    fn errors_name_the_line() {
        let (line, problem) = PromptFile::parse("a fox\n{\"prompt\": }").unwrap_err();
        assert!(line == 2 && problem.contains("invalid JSON"), "{problem}");
        assert!(PromptFile::parse(r#"{"prompt": "a", "model": "b"}"#).unwrap_err().1.contains("`model`"));
        let file = PromptFile::parse("\n{\"prompt\": \"a\", \"widht\": 64}").unwrap();
        let error = file.requests(Request::default()).unwrap_err().to_string();
        assert!(error.contains("line 2") && error.contains("widht"), "{error}");
        let file = PromptFile::parse(r#"{"prompt": "a", "seed": -5}"#).unwrap();
        let error = file.requests(Request::default()).unwrap_err().to_string();
        assert!(error.contains("prompts: seed: expected"), "{error}");
        let file = PromptFile::parse(r#"{"prompt": "a", "seed": -1}"#).unwrap();
        assert!(file.requests(Request::default()).unwrap()[0].seed.is_empty(), "a random one");
    }
}
