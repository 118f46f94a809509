//! The conversation in which a language model rewrites a prompt, as diffusers' `caption_upsample_temperature` asks for it.

use super::PromptTokenizer;
use crate::{Error, Result};

/// Number of ids that a conversation is truncated to, on the right.
const MAX_IDS: usize = 2048;

/// What the model is told for an image from words.
const FROM_TEXT: &str = "You are an expert prompt engineer for FLUX.2 by Black Forest Labs. Rewrite user prompts to be more descriptive while strictly preserving their core subject and intent.\n\nGuidelines:\n1. Structure: Keep structured inputs structured (enhance within fields). Convert natural language to detailed paragraphs.\n2. Details: Add concrete visual specifics - form, scale, textures, materials, lighting (quality, direction, color), shadows, spatial relationships, and environmental context.\n3. Text in Images: Put ALL text in quotation marks, matching the prompt's language. Always provide explicit quoted text for objects that would contain text in reality (signs, labels, screens, etc.) - without it, the model generates gibberish.\n\nOutput only the revised prompt and nothing else.";

/// What the model is told for an edit.
const EDIT: &str = "You are FLUX.2 by Black Forest Labs, an image-editing expert. You convert editing requests into one concise instruction (50-80 words, ~30 for brief requests).\n\nRules:\n- Single instruction only, no commentary\n- Use clear, analytical language (avoid \"whimsical,\" \"cascading,\" etc.)\n- Specify what changes AND what stays the same (face, lighting, composition)\n- Reference actual image elements\n- Turn negatives into positives (\"don't change X\" → \"keep X\")\n- Make abstractions concrete (\"futuristic\" → \"glowing cyan neon, metallic panels\")\n- Keep content PG-13\n\nOutput only the final instruction in plain text and nothing else.";

/// The system message of a conversation about an image from words or about an edit.
pub fn system_message(edit: bool) -> &'static str {
    if edit { EDIT } else { FROM_TEXT }
}

/// A conversation that ends where the model's answer begins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Conversation {
    /// Its ids.
    pub ids: Vec<u32>,
    /// The id that stands for a part of the image.
    pub image: u32,
    /// The id that ends the answer.
    pub end: u32,
}

impl PromptTokenizer {
    /// The conversation about a prompt and, for an edit, an image of `grid` rows and columns of tokens. Only Mistral has one.
    pub fn conversation(&self, prompt: &str, grid: Option<[usize; 2]>) -> Result<Conversation> {
        let id = |token: &str| {
            let missing =
                || Error::Tokenizer(format!("there is no token `{token}`: it can't rewrite prompts"));
            self.tokenizer.id(token).ok_or_else(missing)
        };
        let (image, end) = (id("[IMG]")?, id("</s>")?);
        let shown = grid.map_or_else(String::new, |[rows, columns]| {
            let row = format!("{}[IMG_BREAK]", "[IMG]".repeat(columns));
            let rows = row.repeat(rows);
            format!("[INST]{}[IMG_END][/INST]", rows.strip_suffix("[IMG_BREAK]").unwrap_or(&rows))
        });
        let system = system_message(grid.is_some());
        // A typed token would stand for an image that is not there.
        let prompt = prompt.replace("[IMG]", "");
        let text = format!("<s>[SYSTEM_PROMPT]{system}[/SYSTEM_PROMPT]{shown}[INST]{prompt}[/INST]");
        let mut ids = self.tokenizer.ids(&text).map_err(Error::Tokenizer)?;
        ids.truncate(MAX_IDS);
        Ok(Conversation { ids, image, end })
    }

    /// Returns the text of an answer: without special tokens, and without spaces before punctuation, as transformers
    /// cleans it up.
    pub fn answer(&self, ids: &[u32]) -> String {
        const CLEANED: [(&str, &str); 10] = [
            (" .", "."),
            (" ?", "?"),
            (" !", "!"),
            (" ,", ","),
            (" ' ", "'"),
            (" n't", "n't"),
            (" 'm", "'m"),
            (" 's", "'s"),
            (" 've", "'ve"),
            (" 're", "'re"),
        ];
        CLEANED.iter().fold(self.decode(ids), |text, (from, to)| text.replace(from, to))
    }
}

#[cfg(test)]
mod tests {
    use kiln_family::flux2::{MISTRAL, QWEN3};

    use super::*;

    #[test]
    fn an_image_is_a_turn_of_its_own() {
        let tokenizer = PromptTokenizer::built_in(&MISTRAL).unwrap();
        let words = tokenizer.conversation("a [IMG]cat", None).unwrap();
        assert_eq!(words, tokenizer.conversation("a cat", None).unwrap());
        assert!(!words.ids.contains(&words.image));
        let edit = tokenizer.conversation("a cat", Some([2, 3])).unwrap();
        let start = edit.ids.iter().position(|id| *id == 10).unwrap();
        assert_eq!(edit.ids[start - 1..start + 10], [3, 10, 10, 10, 12, 10, 10, 10, 13, 4, 3]);
        assert_eq!((edit.image, edit.end, edit.ids[0]), (10, 2, 1));
        assert_eq!(tokenizer.conversation(&"a cat ".repeat(2000), None).unwrap().ids.len(), 2048);
        let qwen = PromptTokenizer::built_in(&QWEN3).unwrap();
        assert!(qwen.conversation("a cat", None).unwrap_err().to_string().contains("can't rewrite prompts"));
    }

    #[test]
    fn an_answer_has_no_spaces_before_punctuation() {
        let tokenizer = PromptTokenizer::built_in(&MISTRAL).unwrap();
        let ids = tokenizer.tokenizer.ids("a cat , it 's here . or not ?</s>").unwrap();
        assert_eq!(tokenizer.answer(&ids), "a cat, it's here. or not?");
    }
}
