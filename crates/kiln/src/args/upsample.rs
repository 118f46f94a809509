//! Options of prompt upsampling.

use std::path::PathBuf;

use clap::Args;
use kiln_engine::upsample;

/// Rewriting the prompt before the image is generated.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Prompt")]
pub struct UpsampleArgs {
    /// Rewrite the prompt to a more detailed one first, with dev's text encoder (Mistral) or --upsample-model; the images
    /// of an edit are seen too. The temperature says how freely [default: 0.15 if no number is given]
    #[arg(
        long, value_name = "TEMPERATURE", num_args = 0..=1, default_missing_value = "0.15",
        value_parser = temperature, conflicts_with = "embeds", allow_negative_numbers = true
    )]
    pub upsample: Option<f32>,

    #[command(flatten)]
    pub source: UpsampleSource,
}

/// What rewrites prompts, instead of a model's own text encoder.
#[derive(Clone, Debug, Default, Args)]
#[command(next_help_heading = "Prompt")]
pub struct UpsampleSource {
    /// Mistral Small 3 to rewrite prompts with: a text encoder's folder or file with all layers; with --upsample-url, the
    /// name of the model there
    #[arg(long, value_name = "MODEL")]
    pub upsample_model: Option<PathBuf>,

    /// Rewrite prompts through an OpenAI-compatible chat service, such as http://localhost:8080/v1; its key is taken from
    /// $KILN_UPSAMPLE_KEY, else $OPENAI_API_KEY
    #[arg(long, value_name = "URL")]
    pub upsample_url: Option<String>,
}

impl UpsampleArgs {
    /// The temperature, if a prompt is to be rewritten: naming a model or a service asks for it, too.
    pub fn temperature(&self) -> Option<f32> {
        let named = self.source.upsample_model.is_some() || self.source.upsample_url.is_some();
        self.upsample.or_else(|| named.then_some(upsample::DEFAULT_TEMPERATURE))
    }
}

fn temperature(text: &str) -> Result<f32, String> {
    let number = text.parse::<f32>().map_err(|_| {
        "expected a temperature such as 0.15; write the prompt before --upsample, or --upsample=0.15"
            .to_owned()
    })?;
    upsample::check_temperature(number).map_err(|error| error.to_string())?;
    Ok(number)
}
