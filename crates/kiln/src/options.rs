//! The command line's names of fields.

use clap::{Arg, Command, CommandFactory};
use kiln_engine::Field;

use crate::args::Cli;

/// Says a field as the command line has it: `--dtype f32`; `None` if no command has it.
pub fn name(field: Field, value: Option<&str>) -> Option<String> {
    let id = match field {
        Field::Prompt => {
            return Some(value.map_or("the prompt".into(), |prompt| format!("kiln generate {prompt:?}")));
        }
        Field::Out => return Some("OUT".into()),
        Field::NegativePrompt => "negative_prompts",
        Field::Part => "component",
        Field::Temperature => "upsample",
        Field::OriginalPrompt => return None,
        field => field.name(),
    };
    let command = Cli::command();
    let commands = ["generate", "train", "quantize", "pull"];
    let option = commands.iter().find_map(|name| option(command.find_subcommand(name)?, id))?;
    // The short names are the ones that people know.
    let name = match field {
        Field::Model => "-m".to_owned(),
        Field::Output => "-o".to_owned(),
        Field::Width => "-W".to_owned(),
        Field::Height => "-H".to_owned(),
        _ => format!("--{}", option.get_long()?),
    };
    let value = match value {
        Some("true") if option.get_action().takes_values() => Some("on"),
        Some("true") => None,
        value => value,
    };
    Some(value.map_or(name.clone(), |value| format!("{name} {value}")))
}

fn option<'a>(command: &'a Command, id: &str) -> Option<&'a Arg> {
    command.get_arguments().find(|argument| argument.get_id() == id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_field_that_an_error_names_is_an_option() {
        let unnamed = |field: &&Field| name(**field, None).is_none();
        assert_eq!(Field::ALL.iter().filter(unnamed).collect::<Vec<_>>(), [&Field::OriginalPrompt]);
        assert_eq!(name(Field::Dtype, Some("f32")).unwrap(), "--dtype f32");
        assert_eq!(name(Field::Resume, Some("true")).unwrap(), "--resume");
        assert_eq!(name(Field::Checkpointing, Some("true")).unwrap(), "--checkpointing on");
        assert_eq!(name(Field::LoraPartial, Some("true")).unwrap(), "--lora-partial");
        assert_eq!(name(Field::NegativePrompt, None).unwrap(), "--negative");
        assert_eq!(name(Field::Model, Some("klein")).unwrap(), "-m klein");
    }
}
