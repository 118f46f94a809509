//! `tokenizer.json`, read in a fraction of the time.
//!
//! The `tokenizers` crate finds out the kind of model by keeping all of its 150,000 names and as many pairs in a general
//! form first, which takes longer than everything else before the first kernel. Here a plain byte-pair model, which all
//! published text encoders have, is read straight into place, and the crate gets the rest of the file. Whatever is
//! unusual goes to the crate whole.

use std::collections::HashSet;
use std::fmt;

use serde::de::{Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokenizers::models::bpe::BPE;
use tokenizers::{AddedToken, Tokenizer};

/// The tokenizer of a `tokenizer.json`.
pub(super) fn read(json: &[u8]) -> tokenizers::Result<Tokenizer> {
    match quick(json)? {
        Some(tokenizer) => Ok(tokenizer),
        None => Tokenizer::from_bytes(json),
    }
}

#[derive(Deserialize)]
struct File {
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
    model: Bpe,
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
struct Bpe {
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
    vocab: Names,
    merges: Vec<Merge>,
}

impl Bpe {
    fn is_plain(&self) -> bool {
        let none = |text: &Option<String>| text.as_deref().is_none_or(str::is_empty);
        self.r#type == "BPE"
            && self.dropout.is_null()
            && self.unk_token.is_null()
            && none(&self.continuing_subword_prefix)
            && none(&self.end_of_word_suffix)
            && !(self.fuse_unk || self.byte_fallback || self.ignore_merges)
    }

    /// A pair that is not made of names, or makes none: the crate takes for granted that there is no such.
    fn stray(&self) -> Option<&Merge> {
        let names: HashSet<&str> = self.vocab.0.iter().map(|(name, _)| name.as_str()).collect();
        let mut made = String::new();
        self.merges.iter().find(|Merge(a, b)| {
            made.clear();
            made.push_str(a);
            made.push_str(b);
            ![a.as_str(), b, &made].iter().all(|name| names.contains(name))
        })
    }
}

/// `None` for a file that is not what is expected here.
fn quick(json: &[u8]) -> tokenizers::Result<Option<Tokenizer>> {
    let Some(file) = serde_json::from_slice::<File>(json).ok().filter(|file| file.model.is_plain()) else {
        return Ok(None);
    };
    if let Some(Merge(a, b)) = file.model.stray() {
        return Err(format!("the pair `{a}` and `{b}` is not made of names, or makes none").into());
    }
    let rest = Rest {
        version: file.version,
        added_tokens: [],
        normalizer: file.normalizer,
        pre_tokenizer: file.pre_tokenizer,
        post_processor: file.post_processor,
        decoder: file.decoder,
        model: serde_json::json!({ "type": "BPE", "vocab": {}, "merges": [] }),
    };
    let mut tokenizer = Tokenizer::from_bytes(serde_json::to_vec(&rest)?)?;
    let merges = file.model.merges.into_iter().map(|Merge(a, b)| (a, b)).collect();
    tokenizer.with_model(BPE::new(file.model.vocab.0.into_iter().collect(), merges));
    let added: Vec<_> = file.added_tokens.iter().map(|added| added.token.clone()).collect();
    tokenizer.add_tokens(added)?;
    let in_place = |added: &Added| tokenizer.token_to_id(&added.token.content) == Some(added.id);
    Ok(file.added_tokens.iter().all(in_place).then_some(tokenizer))
}

/// Names and their ids, in the order of the file.
struct Names(Vec<(String, u32)>);

impl<'de> Deserialize<'de> for Names {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Pairs;
        impl<'de> Visitor<'de> for Pairs {
            type Value = Names;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("names and their ids")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Names, A::Error> {
                let mut names = Vec::with_capacity(1 << 17);
                while let Some(pair) = map.next_entry()? {
                    names.push(pair);
                }
                Ok(Names(names))
            }
        }
        deserializer.deserialize_map(Pairs)
    }
}

/// Two names that are put together; written as a pair or, in older files, with a space between.
struct Merge(String, String);

impl<'de> Deserialize<'de> for Merge {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either;
        impl<'de> Visitor<'de> for Either {
            type Value = Merge;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("two names")
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Merge, E> {
                let (a, b) = text.split_once(' ').ok_or_else(|| E::custom("no space"))?;
                Ok(Merge(a.into(), b.into()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Merge, A::Error> {
                let mut next = || seq.next_element()?.ok_or_else(|| A::Error::custom("one name"));
                Ok(Merge(next()?, next()?))
            }
        }
        deserializer.deserialize_any(Either)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = include_str!("../../../../testdata/tokenizer/tokenizer.json");

    fn ids(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
        tokenizer.encode(text, false).unwrap().get_ids().to_vec()
    }

    fn quickly(file: &str) -> Option<Tokenizer> {
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
            assert_eq!(ids(&ours, text), ids(&theirs, text), "{text}");
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
            assert!(read(file.as_bytes()).unwrap_err().to_string().contains("is not made of names"));
        }
    }
}
