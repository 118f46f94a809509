//! `kiln` alone: what this machine is, and what to do next.

use clap::CommandFactory;
use kiln_catalog::ember;
use kiln_engine::machine::{Cpu, Memory};
use kiln_engine::probe_gpus;

use crate::args::Cli;
use crate::bench::KLEIN_4B_BYTES;
use crate::error::CliError;
use crate::values::bytes;
use crate::{models, output};

/// What klein 4B takes of a GPU without streaming, at 1024×1024.
const KLEIN_4B_ON_GPU: u64 = 16 << 30;

pub fn run() -> Result<(), CliError> {
    output::print(kiln_base::printable(&Machine::detect().to_text()).as_bytes())
}

/// What the advice depends on.
struct Machine {
    cpu: String,
    /// In bytes.
    memory: Option<u64>,
    /// The first GPU that can be used, and its memory in bytes.
    gpu: Option<(String, u64)>,
    /// Whether the program has Ember inside.
    ember: bool,
    /// The model that is used without `-m`.
    default_model: Option<String>,
    /// Other models on this machine, by name.
    models: Vec<String>,
    /// Whether the program has a server.
    serves: bool,
}

impl Machine {
    fn detect() -> Machine {
        let (cpu, gpus) = (Cpu::detect(), probe_gpus());
        let gpu = gpus.devices.into_iter().flatten().next().filter(|_| gpus.usable);
        let names = models::folders().all().into_iter().map(|(name, _)| name);
        Machine {
            cpu: format!("{}, {}", cpu.name, kiln_base::plural(cpu.threads, "thread")),
            memory: Memory::detect().map(|memory| memory.total),
            gpu: gpu.map(|(_, gpu)| (gpu.name, gpu.memory)),
            ember: ember::file().is_some(),
            default_model: models::default_model().map(|model| model.display().to_string()),
            models: names.filter(|name| !ember::is_built_in(name)).collect(),
            serves: Cli::command().find_subcommand("serve").is_some(),
        }
    }

    fn to_text(&self) -> String {
        let memory = self.memory.map_or(String::new(), |size| format!(", {} of memory", bytes(size)));
        let gpu = match &self.gpu {
            Some((name, size)) => format!("{name} with {}; ", bytes(*size)),
            None => String::new(),
        };
        let head = format!("Kiln {} on {gpu}{}{memory}\n\n", env!("CARGO_PKG_VERSION"), self.cpu);
        let step = |(what, commands): &(String, Vec<String>)| {
            let commands: String = commands.iter().map(|command| format!("  {command}\n")).collect();
            format!("{what}:\n{commands}")
        };
        head + &self.next_steps().iter().map(step).collect::<String>()
    }

    /// What to do next, and the commands for it.
    fn next_steps(&self) -> Vec<(String, Vec<String>)> {
        let mut steps = Vec::new();
        match (&self.default_model, self.models.first()) {
            (Some(model), _) => steps.push((
                format!("Generate an image with {model}, your default model"),
                vec!["kiln generate \"a red fox in the snow\"".into()],
            )),
            (None, Some(model)) => steps.push((
                format!("Generate an image with {model}, which is on this machine"),
                vec![format!("kiln generate \"a red fox in the snow\" -m {model}")],
            )),
            (None, None) => {
                if self.ember {
                    let what = "Generate an image with Ember, the small model inside this program";
                    steps.push((
                        what.into(),
                        vec!["kiln generate \"a red apple on a blue background\"".into()],
                    ));
                }
                let commands = ["kiln pull klein-4b", "kiln generate \"a red fox in the snow\" -m klein-4b"];
                steps.push((
                    format!("Download klein 4B, 16 GB{}, and use it", self.klein_note()),
                    commands.map(String::from).into(),
                ));
            }
        }
        if self.serves {
            steps.push(("Work in a browser, at http://127.0.0.1:7860".into(), vec!["kiln serve".into()]));
        }
        let more = ["kiln doctor", "kiln --help"].map(String::from).into();
        steps.push(("See what was found on this machine, and all commands".into(), more));
        steps
    }

    /// How klein 4B runs here.
    fn klein_note(&self) -> String {
        match (&self.gpu, self.memory) {
            (Some((_, size)), _) if *size >= KLEIN_4B_ON_GPU => " (fits your GPU)".into(),
            (Some(_), _) => " (partly streamed, since it is larger than your GPU's memory)".into(),
            (None, Some(size)) if size < KLEIN_4B_BYTES => {
                format!(" (very slow with {} of memory and no GPU)", bytes(size))
            }
            (None, _) => " (minutes for an image, without a GPU)".into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine() -> Machine {
        Machine {
            cpu: "a CPU, 8 threads".into(),
            memory: Some(32 << 30),
            gpu: Some(("a GPU".into(), 24 << 30)),
            ember: true,
            default_model: None,
            models: Vec::new(),
            serves: true,
        }
    }

    #[test]
    fn a_new_user_sees_ember_then_klein_then_the_page() {
        let text = machine().to_text();
        let at = |part: &str| text.find(part).unwrap_or_else(|| panic!("`{part}` is missing in:\n{text}"));
        assert!(at("a GPU with 24.0 GiB") < at("Ember"));
        assert!(at("Ember") < at("kiln pull klein-4b") && at("fits your GPU") < at("kiln serve"));
        assert!(at("kiln serve") < at("kiln doctor"));
    }

    #[test]
    fn the_advice_depends_on_what_is_there() {
        let has_model = Machine { models: vec!["klein-9b".into()], ..machine() }.to_text();
        assert!(has_model.contains("-m klein-9b") && !has_model.contains("kiln pull"), "{has_model}");
        let has_default = Machine { default_model: Some("mine".into()), ..machine() }.to_text();
        assert!(has_default.contains("with mine") && !has_default.contains(" -m "), "{has_default}");
        let bare = Machine { ember: false, serves: false, ..machine() }.to_text();
        assert!(!bare.contains("Ember") && !bare.contains("serve"), "{bare}");
        for (gpu, memory, note) in
            [(Some(8), 32, "streamed"), (None, 32, "minutes"), (None, 4, "very slow with 4.0 GiB")]
        {
            let gpu = gpu.map(|gib: u64| ("a GPU".to_owned(), gib << 30));
            let text = Machine { gpu, memory: Some(memory << 30), ..machine() }.to_text();
            assert!(text.contains(note), "{text}");
        }
    }
}
