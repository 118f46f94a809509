//! The words that a small model has learned. FLUX.2 understands any text; a model trained on a few captions draws
//! something arbitrary for every other word, without a sign of it in the image.

use std::collections::BTreeSet;

use serde::Deserialize;

/// Unknown words that a note lists; the others are counted.
const LISTED: usize = 6;
/// Characters of an unknown word that a note shows.
const SHOWN: usize = 40;
/// Examples of each kind that a note gives.
const EXAMPLES: usize = 3;

/// The words of a model's captions, and examples of what it draws. A TOML file beside the model's weights.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Vocabulary {
    /// The model, as a user knows it.
    pub model: String,
    /// What it draws, in one word.
    pub subject: String,
    /// Prompts that it draws well.
    pub examples: Vec<String>,
    /// Colours of things and backgrounds.
    pub colours: Vec<String>,
    /// Styles.
    pub styles: Vec<String>,
    /// Backgrounds, as the end of a prompt.
    pub backgrounds: Vec<String>,
    /// All words, in lower case, separated by white space in the file.
    #[serde(deserialize_with = "split_words")]
    words: BTreeSet<String>,
}

fn split_words<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<BTreeSet<String>, D::Error> {
    let text = String::deserialize(deserializer)?;
    Ok(text.split_whitespace().map(str::to_owned).collect())
}

impl Vocabulary {
    /// Parses the file's text.
    pub fn parse(text: &str) -> Result<Vocabulary, String> {
        toml::from_str(text).map_err(|error| error.to_string())
    }

    /// Returns the number of words.
    pub fn len(&self) -> usize {
        self.words.len()
    }

    /// Returns whether there is no word.
    pub fn is_empty(&self) -> bool {
        self.words.is_empty()
    }

    /// Returns the words of a prompt that the model has not learned, in their order and each once. Upper case and
    /// regular plurals make no difference; emoji and other symbols are words, punctuation is not.
    pub fn unknown_words(&self, prompt: &str) -> Vec<String> {
        let mut unknown: Vec<String> = Vec::new();
        for word in split(prompt) {
            let word = word.to_lowercase();
            if !self.knows(&word) && !unknown.contains(&word) {
                unknown.push(word);
            }
        }
        unknown
    }

    /// Says which words of these prompts the model has not learned, and what it draws; `None` if it knows them all.
    pub fn note<'a>(&self, prompts: impl IntoIterator<Item = &'a str>) -> Option<String> {
        let mut unknown: Vec<String> =
            prompts.into_iter().flat_map(|text| self.unknown_words(text)).collect();
        let mut seen = BTreeSet::new();
        unknown.retain(|word| seen.insert(word.clone()));
        if unknown.is_empty() {
            return None;
        }
        let shown = unknown.iter().take(LISTED).map(|word| format!("\"{}\"", shorten(word)));
        let mut words = shown.collect::<Vec<_>>().join(", ");
        if unknown.len() > LISTED {
            words += &format!(" and {} more words", unknown.len() - LISTED);
        }
        let first = |list: &[String]| list[..list.len().min(EXAMPLES)].join(", ");
        let (model, subject, styles) = (&self.model, &self.subject, self.styles.join(", "));
        Some(format!(
            "{model} has not learned {words}; it draws {subject} ({}), in colours ({} …), styles ({styles}) and on \
             backgrounds ({} …)",
            first(&self.examples),
            first(&self.colours),
            first(&self.backgrounds),
        ))
    }

    fn knows(&self, word: &str) -> bool {
        self.words.contains(word) || singulars(word).any(|word| self.words.contains(&word))
    }
}

/// Returns what a word may be the plural of.
fn singulars(word: &str) -> impl Iterator<Item = String> + '_ {
    const ENDINGS: [(&str, &str); 5] = [("s", ""), ("es", ""), ("ies", "y"), ("ves", "f"), ("ves", "fe")];
    ENDINGS.iter().filter_map(move |(many, one)| {
        // "is" and "gas" are no plurals of "i" and "ga".
        let stem = word.strip_suffix(many).filter(|stem| stem.chars().count() > 2)?;
        Some(format!("{stem}{one}"))
    })
}

/// Splits a text into words of letters and digits, and into runs of symbols such as emoji.
fn split(text: &str) -> impl Iterator<Item = &str> {
    // A possessive is no word of its own.
    let whole = text.split(|c: char| !c.is_alphanumeric() && !is_symbol(c) && !is_apostrophe(c));
    let parts = whole.flat_map(|word| {
        let end = word.char_indices().find(|(_, c)| is_symbol(*c)).map_or(word.len(), |(at, _)| at);
        let (letters, symbols) = word.split_at(end);
        let letters =
            letters.strip_suffix(['s', 'S']).filter(|rest| rest.ends_with(is_apostrophe)).unwrap_or(letters);
        letters.split(is_apostrophe).chain([symbols])
    });
    parts.filter(|word| !word.is_empty())
}

fn is_apostrophe(c: char) -> bool {
    matches!(c, '\'' | '’')
}

/// Whether a character is neither letter, digit, space nor punctuation: an emoji, or a part of one.
fn is_symbol(c: char) -> bool {
    matches!(c, '\u{200d}' | '\u{20e3}' | '\u{2100}'..='\u{2fff}' | '\u{fe0f}' | '\u{1f000}'..='\u{1faff}' | '\u{e0020}'..='\u{e007f}')
        && !c.is_alphanumeric()
}

fn shorten(word: &str) -> String {
    match word.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}…", &word[..end]),
        None => word.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vocabulary() -> Vocabulary {
        let lists = "examples = ['a cat']\ncolours = ['red']\nstyles = ['3d']\nbackgrounds = ['in space']\n";
        Vocabulary::parse(&format!(
            "model = 'Ember'\nsubject = 'emoji'\n{lists}words = '''\na an cat on the bunny leaf box t rex king\n'''"
        ))
        .unwrap()
    }

    #[test]
    fn unknown_words_are_listed_once_in_order() {
        let unknown = vocabulary().unknown_words("A cat riding the KNIGHT, riding on a T-Rex.");
        assert_eq!(unknown, ["riding", "knight"]);
        assert!(vocabulary().unknown_words("").is_empty() && vocabulary().unknown_words("… !").is_empty());
    }

    #[test]
    fn plurals_and_possessives_of_known_words_are_known() {
        assert!(
            vocabulary().unknown_words("Cats, bunnies on boxes, leaves; the king's cat’s cats'").is_empty()
        );
        // A short word that ends in s is not a plural.
        assert_eq!(vocabulary().unknown_words("as cation"), ["as", "cation"]);
    }

    #[test]
    fn emoji_and_other_scripts_are_words() {
        assert_eq!(vocabulary().unknown_words("a 🐱 on 猫, cat👩‍🚀!"), ["🐱", "猫", "👩‍🚀"]);
    }

    #[test]
    fn a_note_names_some_words_and_counts_the_others() {
        let one = vocabulary().note(["a cat", "a knight", "the knight"]).unwrap();
        assert!(one.starts_with("Ember has not learned \"knight\"; it draws emoji (a cat)"), "{one}");
        assert_eq!(vocabulary().note(["a cat on the box"]), None);
        let long = "x".repeat(500);
        let many = vocabulary().note(["b c d e f g h", &long]).unwrap();
        assert!(many.contains("\"g\" and 2 more words;"), "{many}");
        assert!(vocabulary().note([&long[..]]).unwrap().contains(&format!("\"{}…\"", "x".repeat(SHOWN))));
    }
}
