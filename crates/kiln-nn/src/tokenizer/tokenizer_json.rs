//! Parsing of `tokenizer.json`.
//!
//! A vocabulary has 150,000 tokens and as many merges, and a program waits for them before its first kernel. So they are
//! parsed straight into [`BpeModel`]'s tables, without a string or a JSON value for each. Everything that a file asks for
//! is either done or an error that names it: a tokenizer that ignores an option gives wrong tokens.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;

use fancy_regex::Regex;
use kiln_family::Side;
use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::Value;

use super::bpe::BpeModel;
use super::byte_level::{AddedToken, AddedTokens, ByteLevelTokenizer, FileSettings};

/// How `ByteLevel` splits words unless a file says otherwise: the pattern of GPT-2.
const GPT2_PATTERN: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

/// Parses a `tokenizer.json`.
pub(super) fn parse(json: &[u8]) -> Result<ByteLevelTokenizer, String> {
    let text = std::str::from_utf8(json).map_err(|error| error.to_string())?;
    let file: TokenizerJson<'_> = serde_json::from_str(text).map_err(|error| error.to_string())?;
    file.model.check()?;
    let merges: Vec<_> = file.model.merges.iter().map(|Merge(a, b)| (&a.0, &b.0)).collect();
    let model = BpeModel::new(&file.model.vocab.0, &merges, file.model.ignore_merges).map_err(|(a, b)| {
        format!("the merge of `{a}` and `{b}`, or one of its sides, is not in the vocabulary")
    })?;
    let added = file.added_tokens.into_iter().map(AddedEntry::check).collect::<Result<_, _>>()?;
    let nfc = match file.normalizer {
        None => false,
        Some(Normalizer::Nfc) => true,
    };
    let mut splits = Vec::new();
    let byte_level = file.pre_tokenizer.map_or(Ok(false), |step| step.collect(&mut splits))?;
    if !byte_level {
        return Err("the pre-tokenizer is not byte-level; Kiln reads byte-level BPE tokenizers only".into());
    }
    let mut around = [Vec::new(), Vec::new()];
    if let Some(processor) = file.post_processor {
        processor.collect(&mut around)?;
    }
    let settings = FileSettings {
        around,
        padding_side: file.padding.and_then(|padding| padding.direction),
        truncation_side: file.truncation.and_then(|truncation| truncation.direction),
    };
    Ok(ByteLevelTokenizer { added: AddedTokens::new(added), nfc, splits, model, settings })
}

/// The contents of a `tokenizer.json`. The decoder doesn't matter here.
#[derive(Deserialize)]
struct TokenizerJson<'a> {
    #[serde(default)]
    added_tokens: Vec<AddedEntry>,
    normalizer: Option<Normalizer>,
    pre_tokenizer: Option<PreTokenizer>,
    post_processor: Option<PostProcessor>,
    padding: Option<Direction>,
    truncation: Option<Direction>,
    #[serde(borrow)]
    model: BpeJson<'a>,
}

/// How a text is normalized before it is split.
#[derive(Deserialize)]
#[serde(tag = "type")]
enum Normalizer {
    #[serde(rename = "NFC")]
    Nfc,
}

/// How a text is split into words.
#[derive(Deserialize)]
#[serde(tag = "type")]
enum PreTokenizer {
    Sequence {
        pretokenizers: Vec<PreTokenizer>,
    },
    Split {
        pattern: Pattern,
        behavior: String,
        #[serde(default)]
        invert: bool,
    },
    ByteLevel {
        #[serde(default)]
        add_prefix_space: bool,
        #[serde(default = "yes")]
        use_regex: bool,
    },
}

fn yes() -> bool {
    true
}

/// On which side ids are padded or truncated. The lengths come with each call.
#[derive(Deserialize)]
struct Direction {
    direction: Option<Side>,
}

/// What is added to the ids of a text.
#[derive(Deserialize)]
#[serde(tag = "type")]
enum PostProcessor {
    Sequence {
        processors: Vec<PostProcessor>,
    },
    /// Changes offsets only.
    ByteLevel {},
    TemplateProcessing {
        single: Vec<Piece>,
        special_tokens: BTreeMap<String, SpecialToken>,
    },
}

/// A piece of a [`PostProcessor`]'s template.
#[derive(Deserialize)]
enum Piece {
    SpecialToken { id: String },
    Sequence { id: String },
}

#[derive(Deserialize)]
struct SpecialToken {
    ids: Vec<u32>,
}

impl PostProcessor {
    /// Adds its ids to those before and behind a text.
    fn collect(self, around: &mut [Vec<u32>; 2]) -> Result<(), String> {
        match self {
            PostProcessor::Sequence { processors } => {
                processors.into_iter().try_for_each(|processor| processor.collect(around))
            }
            PostProcessor::ByteLevel {} => Ok(()),
            PostProcessor::TemplateProcessing { single, special_tokens } => {
                let unusable = || Err("the post-processor's template is not one of a single text".to_owned());
                let (mut own, mut seen) = ([Vec::new(), Vec::new()], false);
                for piece in single {
                    match piece {
                        Piece::Sequence { id } if id == "A" && !seen => seen = true,
                        Piece::Sequence { .. } => return unusable(),
                        Piece::SpecialToken { id } => {
                            let Some(token) = special_tokens.get(&id) else { return unusable() };
                            own[usize::from(seen)].extend(&token.ids);
                        }
                    }
                }
                if !seen {
                    return unusable();
                }
                let [before, behind] = own;
                around[0].splice(0..0, before);
                around[1].extend(behind);
                Ok(())
            }
        }
    }
}

/// A pattern, or a text that is looked for as it is.
#[derive(Deserialize)]
enum Pattern {
    Regex(String),
    String(String),
}

impl PreTokenizer {
    /// Adds its patterns to a list and returns whether its last stage maps bytes to characters.
    fn collect(self, splits: &mut Vec<Regex>) -> Result<bool, String> {
        match self {
            PreTokenizer::Sequence { pretokenizers } => {
                let mut byte_level = false;
                for step in pretokenizers {
                    if byte_level {
                        return Err("a pre-tokenizer after `ByteLevel` is not supported".into());
                    }
                    byte_level = step.collect(splits)?;
                }
                Ok(byte_level)
            }
            PreTokenizer::Split { pattern, behavior, invert } => {
                if behavior != "Isolated" || invert {
                    return Err(format!(
                        "a split with behavior `{behavior}`, invert {invert}, is not supported"
                    ));
                }
                splits.push(regex(&match pattern {
                    Pattern::Regex(pattern) => pattern,
                    Pattern::String(text) => fancy_regex::escape(&text).into_owned(),
                })?);
                Ok(false)
            }
            PreTokenizer::ByteLevel { add_prefix_space, use_regex } => {
                if add_prefix_space {
                    return Err("`add_prefix_space` is not supported".into());
                }
                if use_regex {
                    splits.push(regex(GPT2_PATTERN)?);
                }
                Ok(true)
            }
        }
    }
}

fn regex(pattern: &str) -> Result<Regex, String> {
    Regex::new(pattern).map_err(|error| format!("the pattern `{pattern}`: {error}"))
}

/// An added token with its id.
#[derive(Deserialize)]
struct AddedEntry {
    id: u32,
    content: String,
    #[serde(default)]
    single_word: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
    #[serde(default)]
    normalized: bool,
    #[serde(default)]
    special: bool,
}

impl AddedEntry {
    fn check(self) -> Result<AddedToken, String> {
        let AddedEntry { id, content, single_word, lstrip, rstrip, normalized, special } = self;
        let options = [("single_word", single_word), ("lstrip", lstrip), ("rstrip", rstrip)];
        if let Some((option, _)) = options.iter().find(|(_, set)| *set) {
            return Err(format!("the added token `{content}` has `{option}`, which is not supported"));
        }
        // Such a token is looked for in normalized text. For ASCII that makes no difference.
        if normalized && !content.is_ascii() {
            return Err(format!("the added token `{content}` has `normalized`, which is not supported"));
        }
        Ok(AddedToken { id, content, special })
    }
}

/// A BPE model in the file.
#[derive(Deserialize)]
struct BpeJson<'a> {
    r#type: String,
    #[serde(default)]
    dropout: Value,
    #[serde(default)]
    unk_token: Value,
    #[serde(default)]
    continuing_subword_prefix: Option<String>,
    #[serde(default)]
    end_of_word_suffix: Option<String>,
    #[serde(default)]
    fuse_unk: bool,
    #[serde(default)]
    byte_fallback: bool,
    #[serde(default)]
    ignore_merges: bool,
    #[serde(borrow)]
    vocab: VocabJson<'a>,
    #[serde(borrow)]
    merges: Vec<Merge<'a>>,
}

impl BpeJson<'_> {
    /// Refuses options that [`BpeModel`] lacks.
    fn check(&self) -> Result<(), String> {
        if self.r#type != "BPE" {
            return Err(format!(
                "a model of type `{}`; Kiln reads byte-level BPE tokenizers only",
                self.r#type
            ));
        }
        let set = |text: &Option<String>| text.as_deref().is_some_and(|text| !text.is_empty());
        let options = [
            ("dropout", !self.dropout.is_null()),
            ("unk_token", !self.unk_token.is_null()),
            ("continuing_subword_prefix", set(&self.continuing_subword_prefix)),
            ("end_of_word_suffix", set(&self.end_of_word_suffix)),
            ("fuse_unk", self.fuse_unk),
            ("byte_fallback", self.byte_fallback),
        ];
        match options.iter().find(|(_, set)| *set) {
            Some((option, _)) => Err(format!("the model's option `{option}` is not supported")),
            None => Ok(()),
        }
    }
}

/// A JSON string, borrowed from the file unless it has escapes.
#[derive(Clone)]
struct JsonStr<'a>(Cow<'a, str>);

impl AsRef<str> for JsonStr<'_> {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for JsonStr<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct StrVisitor;
        impl<'de> Visitor<'de> for StrVisitor {
            type Value = JsonStr<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a token")
            }

            fn visit_borrowed_str<E>(self, text: &'de str) -> Result<JsonStr<'de>, E> {
                Ok(JsonStr(Cow::Borrowed(text)))
            }

            fn visit_str<E>(self, text: &str) -> Result<JsonStr<'de>, E> {
                Ok(JsonStr(Cow::Owned(text.to_owned())))
            }
        }
        deserializer.deserialize_str(StrVisitor)
    }
}

/// Tokens and their ids, in the order of the file.
struct VocabJson<'a>(Vec<(JsonStr<'a>, u32)>);

impl<'de: 'a, 'a> Deserialize<'de> for VocabJson<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct VocabVisitor;
        impl<'de> Visitor<'de> for VocabVisitor {
            type Value = VocabJson<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("tokens and their ids")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<VocabJson<'de>, A::Error> {
                let mut vocab = Vec::with_capacity(1 << 17);
                while let Some(pair) = map.next_entry()? {
                    vocab.push(pair);
                }
                Ok(VocabJson(vocab))
            }
        }
        deserializer.deserialize_map(VocabVisitor)
    }
}

/// The two sides of a merge: an array or, in older files, a string with a space between.
struct Merge<'a>(JsonStr<'a>, JsonStr<'a>);

impl<'de: 'a, 'a> Deserialize<'de> for Merge<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct MergeVisitor;
        impl<'de> Visitor<'de> for MergeVisitor {
            type Value = Merge<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("two tokens")
            }

            fn visit_borrowed_str<E: serde::de::Error>(self, text: &'de str) -> Result<Merge<'de>, E> {
                let (a, b) = text.split_once(' ').ok_or_else(|| E::custom("no space"))?;
                Ok(Merge(JsonStr(Cow::Borrowed(a)), JsonStr(Cow::Borrowed(b))))
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Merge<'de>, E> {
                let (a, b) = text.split_once(' ').ok_or_else(|| E::custom("no space"))?;
                let own = |text: &str| JsonStr(Cow::Owned(text.to_owned()));
                Ok(Merge(own(a), own(b)))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Merge<'de>, A::Error> {
                let mut next = || seq.next_element()?.ok_or_else(|| A::Error::custom("one token"));
                Ok(Merge(next()?, next()?))
            }
        }
        deserializer.deserialize_any(MergeVisitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = include_str!("../../../../testdata/tokenizer/tokenizer.json");

    fn ids(file: &str, text: &str) -> Vec<u32> {
        parse(file.as_bytes()).unwrap().ids(text).unwrap()
    }

    fn edited(edit: impl Fn(&mut Value)) -> String {
        let mut file: Value = serde_json::from_str(FILE).unwrap();
        edit(&mut file);
        file.to_string()
    }

    #[test]
    fn merges_may_be_arrays_or_strings() {
        let file = edited(|file| {
            for merge in file["model"]["merges"].as_array_mut().unwrap() {
                *merge = match &*merge {
                    Value::String(text) => text.split(' ').map(str::to_owned).collect(),
                    pair => format!("{} {}", pair[0].as_str().unwrap(), pair[1].as_str().unwrap()).into(),
                };
            }
        });
        assert_eq!(ids(&file, "a red fox in the snow"), ids(FILE, "a red fox in the snow"));
    }

    #[test]
    fn what_is_not_supported_is_an_error_that_names_it() {
        let split = serde_json::json!({
            "type": "Split", "pattern": { "String": " " }, "behavior": "Removed", "invert": false,
        });
        for (file, word) in [
            (edited(|f| f["model"]["byte_fallback"] = true.into()), "byte_fallback"),
            (edited(|f| f["model"]["unk_token"] = "<unk>".into()), "unk_token"),
            (edited(|f| f["model"]["type"] = "WordLevel".into()), "WordLevel"),
            (edited(|f| f["added_tokens"][0]["lstrip"] = true.into()), "lstrip"),
            (edited(|f| f["normalizer"]["type"] = "NFKC".into()), "NFKC"),
            (edited(|f| f["pre_tokenizer"]["type"] = "Metaspace".into()), "Metaspace"),
            (edited(|f| f["pre_tokenizer"] = split.clone()), "Removed"),
            (edited(|f| f["pre_tokenizer"] = Value::Null), "byte-level"),
            (
                edited(|f| f["pre_tokenizer"]["pretokenizers"][1]["add_prefix_space"] = true.into()),
                "prefix_space",
            ),
            (edited(|f| f["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "(".into()), "`(`"),
            ("{}".into(), "model"),
            (String::new(), "EOF"),
        ] {
            let error = parse(file.as_bytes()).err().unwrap();
            assert!(error.contains(word), "{word} is missing in: {error}");
        }
    }

    #[test]
    fn a_tokenizer_without_a_pattern_splits_as_gpt2_does() {
        let file = edited(|f| f["pre_tokenizer"] = serde_json::json!({ "type": "ByteLevel" }));
        // One pattern splits numbers into digits, the other does not; without merges of digits both give the same.
        assert_eq!(ids(&file, "it's a red fox 12"), ids(FILE, "it's a red fox 12"));
    }

    #[test]
    fn merges_without_a_token_are_an_error() {
        let longest = edited(|f| {
            let vocab = f["model"]["vocab"].as_object().unwrap();
            let longest = vocab.keys().max_by_key(|name| name.len()).unwrap().clone();
            f["model"]["merges"][0] = serde_json::json!([longest, longest]);
        });
        let strange = edited(|f| f["model"]["merges"][0] = serde_json::json!(["no such", "names"]));
        for file in [longest, strange] {
            assert!(parse(file.as_bytes()).err().unwrap().contains("is not in the vocabulary"));
        }
    }
}
