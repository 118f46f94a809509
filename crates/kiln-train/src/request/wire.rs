//! The JSON of fields that can be written in more than one way.

use kiln_engine::OneOrMany;
use serde::{Deserialize, Deserializer};

use super::{Checkpointing, LearningSchedule, SigmaLevels};

/// Reads one value, a list, or nothing.
pub(super) fn one_or_many<'de, T: Deserialize<'de>, D: Deserializer<'de>>(d: D) -> Result<Vec<T>, D::Error> {
    Ok(Option::<OneOrMany<T>>::deserialize(d)?.map_or_else(Vec::new, Vec::from))
}

/// Texts separated by commas, as the HTTP API writes them, or a list.
pub(super) mod comma_list {
    use serde::{Deserializer, Serializer};

    pub(in super::super) fn serialize<S: Serializer>(texts: &[String], s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(&texts.join(","))
    }

    pub(in super::super) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Vec<String>, D::Error> {
        let texts: Vec<String> = super::one_or_many(d)?;
        Ok(texts.iter().flat_map(|text| text.split(',')).map(|text| text.trim().to_owned()).collect())
    }
}

/// A choice by its name, or whether it is on.
#[derive(Deserialize)]
#[serde(untagged)]
enum NameOrFlag {
    Flag(bool),
    Name(String),
}

fn choice<'de, T: Deserialize<'de>, D: Deserializer<'de>>(
    d: D,
    on: T,
    off: T,
) -> Result<Option<T>, D::Error> {
    use serde::de::{IntoDeserializer, value::StringDeserializer};
    let Some(read) = Option::<NameOrFlag>::deserialize(d)? else { return Ok(None) };
    match read {
        NameOrFlag::Flag(is_on) => Ok(Some(if is_on { on } else { off })),
        NameOrFlag::Name(name) => {
            let name: StringDeserializer<D::Error> = name.into_deserializer();
            T::deserialize(name).map(Some)
        }
    }
}

/// Reads a schedule. `cosine` was a flag.
pub(super) fn schedule<'de, D: Deserializer<'de>>(d: D) -> Result<Option<LearningSchedule>, D::Error> {
    choice(d, LearningSchedule::Cosine, LearningSchedule::Constant)
}

/// Reads when to checkpoint. Python has a flag for it.
pub(super) fn checkpointing<'de, D: Deserializer<'de>>(d: D) -> Result<Option<Checkpointing>, D::Error> {
    choice(d, Checkpointing::On, Checkpointing::Off)
}

/// Reads noise levels by name or as a list; an empty list is none.
pub(super) fn sigmas<'de, D: Deserializer<'de>>(d: D) -> Result<Option<SigmaLevels>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "expected logit-normal, uniform, or a list of levels")]
    enum TextOrLevels {
        Text(String),
        Levels(Vec<f32>),
    }
    Ok(match Option::<TextOrLevels>::deserialize(d)? {
        Some(TextOrLevels::Text(text)) => Some(text.parse().map_err(serde::de::Error::custom)?),
        Some(TextOrLevels::Levels(levels)) if !levels.is_empty() => Some(SigmaLevels::List(levels)),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use super::super::{SigmaLevels, TrainRequest};
    use super::*;

    fn read(json: &str) -> TrainRequest {
        serde_json::from_str(json).unwrap()
    }

    #[test]
    fn fields_have_short_forms_and_other_names() {
        let request = read(
            r#"{"output": "me.safetensors", "lr": 0.5, "resolution": 512, "targets": ["attn.to_q", "full"], "cosine": true,
                "checkpointing": false, "sigmas": "0.3,0.6", "sample_prompts": "a fox", "names": "kohya", "ema_decay": 0.9,
                "allow_empty_captions": true}"#,
        );
        assert_eq!((request.learning_rate, &request.resolution[..]), (Some(0.5), &[512][..]));
        assert_eq!(request.schedule, Some(LearningSchedule::Cosine));
        assert_eq!(request.checkpointing, Some(Checkpointing::Off));
        assert_eq!(request.sigmas, Some(SigmaLevels::List(vec![0.3, 0.6])));
        assert!(request.no_captions && request.ema == Some(0.9) && request.sample_prompts == ["a fox"]);
        let json = serde_json::to_string(&request).unwrap();
        assert!(json.contains(r#""name":"me.safetensors""#), "{json}");
        assert!(json.contains(r#""targets":"attn.to_q,full""#), "{json}");
        assert_eq!(read(&json), request);
        assert_eq!(read(r#"{"cosine": null, "sigmas": [], "checkpointing": "auto"}"#).sigmas, None);
        assert_eq!(
            serde_json::to_string(&read(r#"{"sigmas": "uniform"}"#)).unwrap(),
            r#"{"sigmas":"uniform"}"#
        );
    }

    #[test]
    fn a_wrong_choice_is_refused_with_those_there_are() {
        for (json, word) in [
            (r#"{"schedule": "linear"}"#, "cosine"),
            (r#"{"checkpointing": "never"}"#, "auto"),
            (r#"{"sigmas": "many"}"#, "logit-normal"),
            (r#"{"kind": "full"}"#, "dora"),
        ] {
            let error = serde_json::from_str::<TrainRequest>(json).unwrap_err().to_string();
            assert!(error.contains(word), "{json}: {error}");
        }
    }
}
