//! Notes about what a small model can't do well: words that it has not learned, sizes that it was not made for.

use super::contents::Prompt;
use crate::model::Model;

/// Returns the notes about a request. `has_loras`: words may be those that a LoRA has learned, so none is doubted.
pub(super) fn notes(model: &Model, prompt: &Prompt, has_loras: bool, size: [usize; 2]) -> Vec<String> {
    let words = match prompt {
        Prompt::Text { prompts, .. } if !has_loras => {
            let vocabulary = model.vocabulary.as_ref();
            vocabulary.and_then(|vocabulary| vocabulary.note(prompts.iter().map(String::as_str)))
        }
        Prompt::Text { .. } | Prompt::Embeddings { .. } => None,
    };
    words.into_iter().chain(size_note(model, size)).collect()
}

/// What to expect of a small model at this size; `None` at its default size and for models without such limits.
fn size_note(model: &Model, [width, height]: [usize; 2]) -> Option<String> {
    let (sides, best) = (model.trained_sides()?, model.default_size);
    if !sides.contains(&width) || !sides.contains(&height) {
        let (from, to) = (sides.start(), sides.end());
        return Some(format!(
            "this model was trained on sides from {from} to {to} and is best at {best}x{best}; {width}x{height} may \
             look bad"
        ));
    }
    ((width, height) != (best, best)).then(|| {
        format!("this model is best at {best}x{best}; at {width}x{height} it is less exact, and more images are wrong")
    })
}
