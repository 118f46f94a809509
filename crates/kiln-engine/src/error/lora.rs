//! What to do about a LoRA that can't be used.

use kiln_weights::LoraProblem;

use super::{Field, Hint};
use crate::hint;

pub(super) const OTHER_MODEL: &str = "a LoRA fits only the model it was trained on: klein 4B, klein 9B and dev \
                                      differ; compare both with `kiln info`";

pub(super) fn hint(problem: &LoraProblem) -> Hint {
    if problem.settings_file().is_some() {
        return hint!["take the LoRA and its adapter_config.json, which sets its scale, from one download"];
    }
    let text: &'static str = match problem {
        LoraProblem::Shape { .. }
        | LoraProblem::WrongBase { .. }
        | LoraProblem::Flux1
        | LoraProblem::UnknownModules { .. } => OTHER_MODEL,
        LoraProblem::Quantized { .. } | LoraProblem::DType { .. } => {
            "get the LoRA as f32, bf16, f16 or fp8, in which LoRAs are published"
        }
        LoraProblem::UnknownInModule { .. } => {
            "it may change the scale of the module; save the LoRA with the program that made it, without this key"
        }
        LoraProblem::UnsupportedKind { .. } => "LoRA, LoKr, LoHa and DoRA of linear layers are supported",
        LoraProblem::WholeModel { .. } => {
            return hint![
                "use a model with ", Field::Model;
                "use its parts with ", Field::Transformer, ", ", Field::TextEncoder, " and ", Field::Vae
            ];
        }
        LoraProblem::NothingElse(problem) => match **problem {
            LoraProblem::UnknownKeys { .. } => "this is not a LoRA; `kiln info` shows what a file contains",
            _ => "there is nothing in it for the transformer, so that Kiln can't use it",
        },
        LoraProblem::TextEncoder { .. } | LoraProblem::OtherPart { .. } => {
            return hint![Field::LoraPartial.on(), " ignores these and uses the rest"];
        }
        LoraProblem::MetadataAlpha { .. } => {
            "programs differ in which one they use; save the LoRA again with the program that made it"
        }
        LoraProblem::DoraOfColumns { .. } => {
            return hint!["use ", Field::DoraRule.to("comfyui"), ": diffusers does not read such a DoRA"];
        }
        LoraProblem::Setting { .. } => "merge it into its model with PEFT, and use the merged model",
        LoraProblem::Adapters { .. } => {
            return hint!["save each adapter to a file of its own, and give both with ", Field::Loras];
        }
        LoraProblem::UnknownKeys { .. } => {
            return hint![
                "`kiln info` shows what the file contains";
                "if it is a LoRA, use what fits with ", Field::LoraPartial.on()
            ];
        }
        LoraProblem::Empty => "this is not a LoRA; `kiln info` shows what a file contains",
        _ => {
            "the file is damaged or incomplete; download it again, or save it with diffusers' `save_lora_weights`"
        }
    };
    text.into()
}
