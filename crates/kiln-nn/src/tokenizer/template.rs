//! A prompt inside the text that a text encoder was trained with.

use std::borrow::Cow;

use kiln_family::{Side, TextEncoder};

/// The [template](kiln_family::Template) of a text encoder, as far as a tokenizer's own files leave it.
#[derive(Clone)]
pub(super) struct Template {
    pub start: Cow<'static, str>,
    pub end: Cow<'static, str>,
    deleted: Option<&'static str>,
    pub required: &'static [&'static str],
    pub padding: &'static str,
    pub padding_side: Side,
    pub truncation_side: Side,
}

impl Template {
    pub fn of(encoder: &TextEncoder) -> Template {
        let kiln_family::Template { start, end, deleted, required, padding, padding_side, truncation_side } =
            encoder.template;
        let (start, end) = (start.into(), end.into());
        Template { start, end, deleted, required, padding, padding_side, truncation_side }
    }

    /// Inserts a prompt.
    pub fn apply(&self, prompt: &str) -> String {
        // One pass: what a deletion joins together stays.
        let prompt = match self.deleted {
            Some(token) => Cow::Owned(prompt.replace(token, "")),
            None => Cow::Borrowed(prompt),
        };
        [&*self.start, &prompt, &*self.end].concat()
    }
}
