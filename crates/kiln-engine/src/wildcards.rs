//! Wildcards in prompts and negative prompts: `{red|blue}` becomes one of the alternatives, `__colour__` a line of `colour.txt`.
//!
//! The image's seed chooses, so an image is generated again from its seed, and the images of a batch differ. A prompt
//! that is a JSON object is left alone: its braces are its own.

use std::collections::HashMap;
use std::path::Path;

use serde_json::Value;

use crate::error::{Error, Field, Result};
use crate::hint;
use crate::request::Request;

/// Lists within lists: more is a list that contains itself.
const MAX_DEPTH: usize = 16;
/// Alternatives within alternatives.
const MAX_NESTING: usize = 64;
/// Wildcards of one prompt, with those that they bring: lists that name each other multiply.
const MAX_WILDCARDS: usize = 10_000;

/// Replaces the wildcards of the request's prompts and negative prompts, which gives every image its own. Lists are files
/// of `folder`. Returns the name of a list that was left alone for lack of a folder.
pub fn expand(request: &mut Request, folder: Option<&Path>) -> Result<Option<String>> {
    let prompts = request.prompts.len();
    let per_prompt = match (request.n, request.seed.len()) {
        (Some(n), _) => n as usize,
        (None, seeds @ 2..) if seeds.is_multiple_of(prompts.max(1)) => seeds / prompts.max(1),
        (None, _) => 1,
    };
    let mut texts = request.prompts.iter().chain(&request.negative_prompts);
    let unknown = folder.is_none().then(|| texts.clone().find_map(|text| list_name(text))).flatten();
    let unknown = unknown.map(str::to_owned);
    let has_wildcards = |text: &String| !is_json(text) && (text.contains('{') || text.contains("__"));
    // Too many images are refused later, before anything is generated.
    if !texts.any(has_wildcards) || per_prompt.saturating_mul(prompts) > 100_000 {
        return Ok(unknown);
    }
    let seeds = request.seeds(prompts * per_prompt);
    let (mut expanded, mut negatives) = (Vec::with_capacity(seeds.len()), Vec::new());
    for i in 0..prompts * per_prompt {
        let mut chooser = Chooser::new(seeds.get(i).copied().unwrap_or(i as u64), folder);
        expanded.push(chooser.expand_prompt(&request.prompts[i / per_prompt])?);
        if let Some(negative) =
            request.negative_prompts.get(i / per_prompt).or(request.negative_prompts.first())
        {
            negatives.push(chooser.expand_prompt(negative)?);
        }
    }
    let is_unchanged = |texts: &[String], given: &[String]| {
        texts.iter().enumerate().all(|(i, text)| given.get(i / per_prompt).or(given.first()) == Some(text))
    };
    let (same_prompts, same_negatives) =
        (is_unchanged(&expanded, &request.prompts), is_unchanged(&negatives, &request.negative_prompts));
    if same_prompts && same_negatives {
        return Ok(unknown);
    }
    (request.prompts, request.n) = (expanded, None);
    // One for all stays one.
    if !same_negatives || request.negative_prompts.len() > 1 {
        request.negative_prompts = negatives;
    }
    Ok(unknown)
}

fn is_json(text: &str) -> bool {
    text.trim_start().starts_with('{') && matches!(serde_json::from_str(text), Ok(Value::Object(_)))
}

/// Chooses alternatives by a generator of random numbers.
struct Chooser<'a> {
    state: u64,
    folder: Option<&'a Path>,
    /// Wildcards that may still be replaced.
    left: usize,
    /// Alternatives around the current text.
    nesting: usize,
}

impl<'a> Chooser<'a> {
    fn new(seed: u64, folder: Option<&'a Path>) -> Chooser<'a> {
        Chooser { state: seed, folder, left: MAX_WILDCARDS, nesting: 0 }
    }

    fn expand_prompt(&mut self, prompt: &str) -> Result<String> {
        if is_json(prompt) { Ok(prompt.to_owned()) } else { self.expand(prompt, 0) }
    }

    fn expand(&mut self, text: &str, depth: usize) -> Result<String> {
        let mut out = String::new();
        let groups = groups(text);
        let mut at = 0;
        while let Some(first) = text[at..].chars().next() {
            let rest = &text[at..];
            if let Some(escaped) = escaped(rest) {
                out.push_str(escaped);
                at += 1 + escaped.len();
            } else if let Some(group) = groups.get(&at).filter(|group| group.is_choice()) {
                self.count()?;
                self.nesting += 1;
                if self.nesting > MAX_NESTING {
                    return Err(too_many(format!("alternatives lie within {MAX_NESTING} others")));
                }
                let chosen = self.below(group.bars.len() + 1);
                out.push_str(&self.expand(group.alternative(text, at, chosen), depth)?);
                self.nesting -= 1;
                at = group.end + 1;
            } else if let (Some((name, after)), Some(folder)) = (list(rest), self.folder) {
                self.count()?;
                let lines = read_list(folder, name)?;
                if depth == MAX_DEPTH {
                    return Err(Error::request(format!("the wildcard `__{name}__` contains itself"))
                        .with_hint(format!("see `{name}.txt` and the lists it names")));
                }
                let chosen = &lines[self.below(lines.len())];
                out.push_str(&self.expand(chosen, depth + 1)?);
                at = text.len() - after.len();
            } else {
                out.push(first);
                at += first.len_utf8();
            }
        }
        Ok(out)
    }

    fn count(&mut self) -> Result<()> {
        self.left = self
            .left
            .checked_sub(1)
            .ok_or_else(|| too_many(format!("more than {MAX_WILDCARDS} are replaced")))?;
        Ok(())
    }

    /// Returns a number below `count`, by the SplitMix64 generator.
    fn below(&mut self, count: usize) -> usize {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^= mixed >> 31;
        ((u128::from(mixed) * count as u128) >> 64) as usize
    }
}

fn too_many(what: String) -> Error {
    Error::request(format!("the prompt has too many wildcards: {what}"))
        .with_hint("use fewer alternatives, or lists that name fewer others")
}

/// The brace or bar that a text starts with, if a backslash before it takes its meaning.
fn escaped(text: &str) -> Option<&str> {
    text.strip_prefix('\\').filter(|rest| rest.starts_with(['{', '|', '}'])).map(|rest| &rest[..1])
}

/// A pair of braces: the places of the bars in it, and of its end.
struct Group {
    bars: Vec<usize>,
    end: usize,
}

impl Group {
    fn is_choice(&self) -> bool {
        !self.bars.is_empty()
    }

    /// The alternative with this number, of a group that starts at `start`.
    fn alternative<'t>(&self, text: &'t str, start: usize, number: usize) -> &'t str {
        let from = number.checked_sub(1).map_or(start, |before| self.bars[before]) + 1;
        &text[from..self.bars.get(number).copied().unwrap_or(self.end)]
    }
}

/// The pairs of braces of a text by the place where each starts, found in one pass.
fn groups(text: &str) -> HashMap<usize, Group> {
    let (mut found, mut open) = (HashMap::new(), Vec::<(usize, Vec<usize>)>::new());
    let mut after_escape = 0;
    for (at, byte) in text.bytes().enumerate() {
        if at < after_escape {
            continue;
        }
        match byte {
            b'\\' if escaped(&text[at..]).is_some() => after_escape = at + 2,
            b'{' => open.push((at, Vec::new())),
            b'|' => open.last_mut().into_iter().for_each(|(_, bars)| bars.push(at)),
            b'}' => found.extend(open.pop().map(|(start, bars)| (start, Group { bars, end: at }))),
            _ => {}
        }
    }
    found
}

/// Splits `__name__rest` into the name and the rest; `None` if the text doesn't start with a name.
fn list(text: &str) -> Option<(&str, &str)> {
    let (name, after) = text.strip_prefix("__")?.split_once("__")?;
    let allowed = |c: char| c.is_alphanumeric() || ['-', '_', '/'].contains(&c);
    (!name.is_empty() && !name.starts_with('/') && name.chars().all(allowed)).then_some((name, after))
}

/// Returns the first name of a list in a prompt.
fn list_name(text: &str) -> Option<&str> {
    text.match_indices("__").find_map(|(i, _)| list(&text[i..]).map(|(name, _)| name))
}

/// Reads the lines of a list; empty lines and comments (`#`) don't count.
fn read_list(folder: &Path, name: &str) -> Result<Vec<String>> {
    let path = folder.join(format!("{name}.txt"));
    let shown = path.display();
    let text = kiln_base::read_regular_text(&path).map_err(|e| {
        Error::request(format!("can't read the list of the wildcard `__{name}__`, `{shown}`: {e}")).with_hint(
            hint!["write the file, one alternative per line"; "name another folder with ", Field::Wildcards],
        )
    })?;
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    let lines: Vec<String> = lines.map(str::to_owned).collect();
    if lines.is_empty() {
        return Err(Error::request(format!("the list of the wildcard `__{name}__`, `{shown}`, is empty"))
            .with_hint("write one alternative per line"));
    }
    Ok(lines)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn expanded(prompt: &str, seed: u64) -> String {
        let mut request = Request { seed: vec![seed], ..Request::new(prompt) };
        expand(&mut request, None).unwrap();
        request.prompts.remove(0)
    }

    #[test]
    fn the_seed_chooses_among_the_alternatives() {
        let prompts: Vec<String> =
            (0..40).map(|seed| expanded("a {red|blue|} {fox|{hen|cock}}", seed)).collect();
        assert_eq!(expanded("a {red|blue|} {fox|{hen|cock}}", 7), prompts[7]);
        for all in ["a red fox", "a blue hen", "a  cock"] {
            assert!(prompts.iter().any(|prompt| prompt == all), "{all}: {prompts:?}");
        }
    }

    #[test]
    fn other_braces_stay() {
        for text in ["{", "a {fox}", "}|{", r#"{"scene": "a|b", "n": 1}"#, "a | b", "{a|b", "snake__case"] {
            assert_eq!(expanded(text, 1), text);
        }
        assert_eq!(expanded(r"\{a|b} and \{c\|d\}", 1), "{a|b} and {c|d}");
    }

    #[test]
    fn hostile_prompts_take_little_time_and_stack() {
        // Without the pass over all braces, every brace searches the whole text for its end.
        let open = "{".repeat(1 << 20);
        assert_eq!(expanded(&open, 1), open);
        let mut lucky = Chooser::new(7, None);
        // The prompt that the numbers of this seed choose to its end.
        let choices: Vec<usize> = (0..5000).map(|_| lucky.below(2)).collect();
        let chosen = |inner: String, choice: &usize| match choice {
            0 => format!("{{{inner}|}}"),
            _ => format!("{{|{inner}}}"),
        };
        let deep = choices.iter().rev().fold("a".to_owned(), chosen);
        let error = Chooser::new(7, None).expand_prompt(&deep).unwrap_err().to_string();
        assert!(error.contains("too many wildcards"), "{error}");
    }

    #[test]
    fn lists_that_multiply_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        for level in 0..8 {
            let line = format!("__l{}__", level + 1).repeat(10);
            fs::write(folder.path().join(format!("l{level}.txt")), line).unwrap();
        }
        fs::write(folder.path().join("l8.txt"), "{|}").unwrap();
        let mut request = Request { seed: vec![1], ..Request::new("__l0__") };
        let error = expand(&mut request, Some(folder.path())).unwrap_err().to_string();
        assert!(error.contains("too many wildcards"), "{error}");
    }

    #[test]
    fn every_image_of_a_batch_gets_its_own_prompt() {
        let mut request = Request { seed: vec![1], n: Some(3), ..Request::new("{a|b|c|d|e|f|g}") };
        request.prompts.push("plain".into());
        request.negative_prompts = vec!["x".into(), "y".into()];
        expand(&mut request, None).unwrap();
        let alone: Vec<String> = (1..4).map(|seed| expanded("{a|b|c|d|e|f|g}", seed)).collect();
        assert_eq!(request.prompts[..3], alone);
        assert_eq!(request.prompts[3..], ["plain", "plain", "plain"]);
        assert_eq!(request.negative_prompts, ["x", "x", "x", "y", "y", "y"]);
        assert_eq!(request.n, None);
    }

    #[test]
    fn negative_prompts_have_wildcards_too() {
        let request = |negatives: &[&str]| Request {
            seed: vec![1],
            n: Some(8),
            negative_prompts: negatives.iter().map(|text| (*text).to_owned()).collect(),
            ..Request::new("plain")
        };
        let mut varied = request(&["{rain|snow}"]);
        expand(&mut varied, None).unwrap();
        assert_eq!((varied.prompts.len(), varied.negative_prompts.len(), varied.n), (8, 8, None));
        for weather in ["rain", "snow"] {
            assert!(varied.negative_prompts.iter().any(|text| text == weather), "{varied:?}");
        }
        let mut plain = Request { prompts: vec!["a {red|blue} fox".into()], ..request(&["rain"]) };
        expand(&mut plain, None).unwrap();
        assert_eq!(plain.negative_prompts, ["rain"]);
    }

    #[test]
    fn lists_come_from_files_and_may_name_each_other() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("animal.txt"), "# animals\n\n__bird__\n").unwrap();
        fs::write(folder.path().join("bird.txt"), "{hen|hen}\n").unwrap();
        fs::write(folder.path().join("loop.txt"), "__loop__").unwrap();
        let with = |prompt: &str, folder| {
            let mut request = Request { seed: vec![1], ..Request::new(prompt) };
            expand(&mut request, folder).map(|unknown| (request.prompts.remove(0), unknown))
        };
        assert_eq!(with("a __animal__!", Some(folder.path())).unwrap(), ("a hen!".into(), None));
        let error = |prompt| with(prompt, Some(folder.path())).unwrap_err().to_string();
        assert!(error("__none__").contains("none.txt") && error("__loop__").contains("contains itself"));
        let (prompt, unknown) = with("a __animal__", None).unwrap();
        assert!(prompt == "a __animal__" && unknown.unwrap() == "animal");
    }
}
