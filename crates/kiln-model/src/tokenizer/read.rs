//! `tokenizer.json`, read in a fraction of the time.
//!
//! The `tokenizers` crate finds out the kind of model by keeping all of its 150,000 names and as many pairs in a general
//! form first, and its byte-pair model has strings of its own for each of them: that takes longer than everything else
//! before the first kernel. Here a plain byte-pair model, which all published text encoders have, goes straight from the
//! file's text into [`Pairs`], and the crate gets the rest of the file. Whatever is unusual goes to the crate whole.

use std::borrow::Cow;
use std::fmt;

use serde::de::{Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokenizers::{
    AddedToken, DecoderWrapper, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper, Tokenizer,
    TokenizerImpl,
};

use super::pairs::Pairs;

/// The crate's tokenizer around our model.
type Quick =
    TokenizerImpl<Pairs, NormalizerWrapper, PreTokenizerWrapper, PostProcessorWrapper, DecoderWrapper>;

/// A tokenizer of either kind.
pub(super) enum Either {
    Quick(Box<Quick>),
    Any(Box<Tokenizer>),
}

impl Either {
    /// The ids of a text, not cut or padded, whatever the file asks for.
    pub fn ids(&self, text: &str) -> tokenizers::Result<Vec<u32>> {
        let encoding = match self {
            Either::Quick(tokenizer) => tokenizer.encode(text, false)?,
            Either::Any(tokenizer) => tokenizer.encode(text, false)?,
        };
        Ok(encoding.get_ids().to_vec())
    }

    /// The id of a name.
    pub fn id(&self, name: &str) -> Option<u32> {
        match self {
            Either::Quick(tokenizer) => tokenizer.token_to_id(name),
            Either::Any(tokenizer) => tokenizer.token_to_id(name),
        }
    }
}

/// The tokenizer of a `tokenizer.json`.
pub(super) fn read(json: &[u8]) -> tokenizers::Result<Either> {
    if let Some(tokenizer) = quick(json)? {
        return Ok(Either::Quick(Box::new(tokenizer)));
    }
    let mut tokenizer = Tokenizer::from_bytes(json)?;
    tokenizer.with_padding(None);
    tokenizer.with_truncation(None)?;
    Ok(Either::Any(Box::new(tokenizer)))
}

#[derive(Deserialize)]
struct File<'a> {
    version: Value,
    #[serde(default)]
    added_tokens: Vec<Added>,
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    post_processor: Value,
    #[serde(default)]
    decoder: Value,
    #[serde(borrow)]
    model: Bpe<'a>,
}

/// The file without its model and the tokens that come after it.
#[derive(Serialize)]
struct Rest {
    version: Value,
    added_tokens: [Value; 0],
    normalizer: Value,
    pre_tokenizer: Value,
    post_processor: Value,
    decoder: Value,
    model: Value,
}

#[derive(Deserialize)]
struct Added {
    id: u32,
    #[serde(flatten)]
    token: AddedToken,
}

/// A byte-pair model; the fields that make it an unusual one must be empty.
#[derive(Deserialize)]
struct Bpe<'a> {
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
    vocab: Names<'a>,
    #[serde(borrow)]
    merges: Vec<Merge<'a>>,
}

impl Bpe<'_> {
    fn is_plain(&self) -> bool {
        let none = |text: &Option<String>| text.as_deref().is_none_or(str::is_empty);
        self.r#type == "BPE"
            && self.dropout.is_null()
            && self.unk_token.is_null()
            && none(&self.continuing_subword_prefix)
            && none(&self.end_of_word_suffix)
            && !(self.fuse_unk || self.byte_fallback || self.ignore_merges)
    }
}

/// `None` for a file that is not what is expected here.
fn quick(json: &[u8]) -> tokenizers::Result<Option<Quick>> {
    let Some(file) =
        std::str::from_utf8(json).ok().and_then(|text| serde_json::from_str::<File<'_>>(text).ok())
    else {
        return Ok(None);
    };
    if !file.model.is_plain() {
        return Ok(None);
    }
    let merges: Vec<_> = file.model.merges.iter().map(|Merge(a, b)| (&a.0, &b.0)).collect();
    let pairs = Pairs::new(&file.model.vocab.0, &merges)
        .map_err(|(a, b)| format!("the pair `{a}` and `{b}` is not made of names, or makes none"))?;
    let rest = Rest {
        version: file.version,
        added_tokens: [],
        normalizer: file.normalizer,
        pre_tokenizer: file.pre_tokenizer,
        post_processor: file.post_processor,
        decoder: file.decoder,
        model: serde_json::json!({ "type": "BPE", "vocab": {}, "merges": [] }),
    };
    let rest = Tokenizer::from_bytes(serde_json::to_vec(&rest)?)?;
    let mut tokenizer = Quick::new(pairs);
    tokenizer
        .with_normalizer(rest.get_normalizer().cloned())?
        .with_pre_tokenizer(rest.get_pre_tokenizer().cloned())
        .with_post_processor(rest.get_post_processor().cloned())
        .with_decoder(rest.get_decoder().cloned());
    let added: Vec<_> = file.added_tokens.iter().map(|added| added.token.clone()).collect();
    tokenizer.add_tokens(added)?;
    let in_place = |added: &Added| tokenizer.token_to_id(&added.token.content) == Some(added.id);
    Ok(file.added_tokens.iter().all(in_place).then_some(tokenizer))
}

/// A text that is part of the file's, unless something in it is escaped.
#[derive(Clone)]
struct Text<'a>(Cow<'a, str>);

impl AsRef<str> for Text<'_> {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Text<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Whole;
        impl<'de> Visitor<'de> for Whole {
            type Value = Text<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a name")
            }

            fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Text<'de>, E> {
                Ok(Text(Cow::Borrowed(text)))
            }

            fn visit_str<E>(self, text: &str) -> Result<Text<'de>, E> {
                Ok(Text(Cow::Owned(text.to_owned())))
            }
        }
        deserializer.deserialize_str(Whole)
    }
}

/// Names and their ids, in the order of the file.
struct Names<'a>(Vec<(Text<'a>, u32)>);

impl<'de: 'a, 'a> Deserialize<'de> for Names<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct All;
        impl<'de> Visitor<'de> for All {
            type Value = Names<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("names and their ids")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Names<'de>, A::Error> {
                let mut names = Vec::with_capacity(1 << 17);
                while let Some(pair) = map.next_entry()? {
                    names.push(pair);
                }
                Ok(Names(names))
            }
        }
        deserializer.deserialize_map(All)
    }
}

/// Two names that are put together; written as a pair or, in older files, with a space between.
struct Merge<'a>(Text<'a>, Text<'a>);

impl<'de: 'a, 'a> Deserialize<'de> for Merge<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct EitherWay;
        impl<'de> Visitor<'de> for EitherWay {
            type Value = Merge<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("two names")
            }

            fn visit_borrowed_str<E: serde::de::Error>(self, text: &'de str) -> Result<Merge<'de>, E> {
                let (a, b) = text.split_once(' ').ok_or_else(|| E::custom("no space"))?;
                Ok(Merge(Text(Cow::Borrowed(a)), Text(Cow::Borrowed(b))))
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Merge<'de>, E> {
                let (a, b) = text.split_once(' ').ok_or_else(|| E::custom("no space"))?;
                let own = |text: &str| Text(Cow::Owned(text.to_owned()));
                Ok(Merge(own(a), own(b)))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Merge<'de>, A::Error> {
                let mut next = || seq.next_element()?.ok_or_else(|| A::Error::custom("one name"));
                Ok(Merge(next()?, next()?))
            }
        }
        deserializer.deserialize_any(EitherWay)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = include_str!("../../../../testdata/tokenizer/tokenizer.json");

    fn ids(tokenizer: &Quick, text: &str) -> Vec<u32> {
        tokenizer.encode(text, false).unwrap().get_ids().to_vec()
    }

    fn quickly(file: &str) -> Option<Quick> {
        quick(file.as_bytes()).unwrap()
    }

    fn edited(edit: impl Fn(&mut Value)) -> String {
        let mut file: Value = serde_json::from_str(FILE).unwrap();
        edit(&mut file);
        file.to_string()
    }

    #[test]
    fn both_ways_give_the_same_ids() {
        let (ours, theirs) = (quickly(FILE).unwrap(), Tokenizer::from_bytes(FILE).unwrap());
        for text in
            ["", "a red fox", "<|im_start|>user\nÅ  ngström é 12345 <think>x</think>", "日本語\r\n\t🦊 it's"]
        {
            assert_eq!(ids(&ours, text), theirs.encode(text, false).unwrap().get_ids(), "{text}");
        }
        assert_eq!(ours.get_vocab_size(true), theirs.get_vocab_size(true));
    }

    #[test]
    fn pairs_may_be_written_in_either_way() {
        let file = edited(|file| {
            for merge in file["model"]["merges"].as_array_mut().unwrap() {
                *merge = match &*merge {
                    Value::String(text) => text.split(' ').map(str::to_owned).collect(),
                    pair => format!("{} {}", pair[0].as_str().unwrap(), pair[1].as_str().unwrap()).into(),
                };
            }
        });
        let (other, this) = (quickly(&file).unwrap(), quickly(FILE).unwrap());
        assert_eq!(ids(&other, "a red fox in the snow"), ids(&this, "a red fox in the snow"));
    }

    #[test]
    fn what_is_unusual_is_left_to_the_crate() {
        assert!(quickly(&edited(|f| f["model"]["byte_fallback"] = true.into())).is_none());
        assert!(quickly(&edited(|f| f["model"]["type"] = "WordLevel".into())).is_none());
        assert!(quickly(&edited(|f| f["added_tokens"][0]["id"] = 7.into())).is_none());
        assert!(quickly("{}").is_none() && quickly("").is_none());
    }

    #[test]
    fn pairs_that_make_no_name_are_an_error() {
        let longest = edited(|f| {
            let vocab = f["model"]["vocab"].as_object().unwrap();
            let longest = vocab.keys().max_by_key(|name| name.len()).unwrap().clone();
            f["model"]["merges"][0] = serde_json::json!([longest, longest]);
        });
        let strange = edited(|f| f["model"]["merges"][0] = serde_json::json!(["no such", "names"]));
        for file in [longest, strange] {
            assert!(read(file.as_bytes()).err().unwrap().to_string().contains("is not made of names"));
        }
    }
}
