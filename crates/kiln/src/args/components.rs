//! Components of a model that options name.

use std::path::PathBuf;

use clap::Args;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use kiln_engine::ComponentPaths;
use kiln_family::Variant;

/// Components that replace the model's own.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Model")]
pub struct ComponentArgs {
    /// Transformer to use instead of the model's, or as the model
    #[arg(long, alias = "diffusion-model", value_name = "PATH")]
    pub transformer: Option<PathBuf>,

    /// Text encoder to use instead of the model's
    #[arg(long, alias = "llm", value_name = "PATH")]
    pub text_encoder: Option<PathBuf>,

    /// Tokenizer to use instead of the model's: tokenizer.json, or a folder with it
    #[arg(long, value_name = "PATH")]
    pub tokenizer: Option<PathBuf>,

    /// Variant of the model, if neither model_index.json nor the name tells it
    #[arg(long, value_name = "VARIANT", value_parser = variants())]
    pub variant: Option<Variant>,
}

/// Parses the name of a variant.
pub fn variants() -> impl TypedValueParser<Value = Variant> {
    let values = kiln_family::variants().map(|variant| {
        let is_offered = !variant.family.models.is_empty();
        PossibleValue::new(variant.name).help(variant.summary).hide(!is_offered)
    });
    PossibleValuesParser::new(values).try_map(|name| name.parse::<Variant>())
}

impl ComponentArgs {
    pub fn paths(&self) -> ComponentPaths {
        ComponentPaths {
            transformer: self.transformer.clone(),
            text_encoder: self.text_encoder.clone(),
            vae: None,
            tokenizer: self.tokenizer.clone(),
            variant: self.variant,
            ..ComponentPaths::default()
        }
    }
}
