//! `kiln pull`: downloads a model into the Hugging Face cache.

use std::io::IsTerminal;
use std::path::Path;

use indicatif::{ProgressBar, ProgressStyle};
use kiln_base::printable_line;
use kiln_engine::ComponentPaths;
use kiln_hub::{HubSettings, ModelName, PullProgress};

use crate::args::PullArgs;
use crate::cancel::{self, CancelFlag};
use crate::error::{CliError, ErrorContext};
use crate::properties::Properties;
use crate::values::{bytes, plural};
use crate::{hints, terminal};

pub fn run(args: &PullArgs) -> Result<(), CliError> {
    let name = ModelName::parse(&args.name)?;
    let settings = super::settings()?;
    HubSettings::check_env()?;
    if is_set("HF_HUB_OFFLINE") {
        return Err(CliError::new("downloads are disabled: HF_HUB_OFFLINE is set")
            .hint("unset the variable for this command"));
    }
    let mut display = DownloadDisplay::new(args.quiet || args.json);
    if let Some(bar) = display.bar.clone() {
        cancel::before_exit(move || bar.finish_and_clear());
    }
    // A signal ends it at once, whatever the hub does: the next pull resumes what is there.
    CancelFlag::install();
    let pulled = kiln_hub::pull(&settings, &name, &mut |progress| {
        display.update(progress);
        true
    });
    display.clear();
    let pulled = pulled.with_context(|| format!("downloading `{}` from {}", args.name, settings.endpoint))?;
    if args.json {
        let properties = Properties::default()
            .with("name", name.short())
            .with("repo", &name.repo)
            .with("commit", &pulled.commit)
            .with("folder", pulled.snapshot.display().to_string())
            .with("files", pulled.files)
            .with("bytes", pulled.bytes)
            .with("fetched", pulled.downloaded);
        return crate::print(properties.to_json().as_bytes());
    }
    if !args.quiet {
        let (files, size) = (plural(pulled.files, "file"), bytes(pulled.bytes));
        let downloaded = match pulled.downloaded {
            0 => "already complete".to_owned(),
            fetched => format!("{} downloaded", bytes(fetched)),
        };
        let (folder, short) = (pulled.snapshot.display(), name.short());
        let missing = missing_components(&pulled.snapshot, &name);
        let text = format!("{files}, {size} ({downloaded}) in `{folder}`\nuse it with -m {short}{missing}");
        terminal::tell(&text);
    }
    Ok(())
}

/// Reports which components are missing: a lone transformer has no text encoder and no autoencoder.
fn missing_components(snapshot: &Path, name: &ModelName) -> String {
    if snapshot.join("model_index.json").is_file() && name.pattern.is_none() {
        return String::new();
    }
    let path = super::find_pulled(Path::new(&name.short())).map(|(_, path)| path);
    let model = path.and_then(|path| hints::open_model_with(&path, &ComponentPaths::default()).ok());
    let Some(model) = model else { return String::new() };
    let components = [("text encoder", model.text_encoder.is_none()), ("autoencoder", model.vae.is_none())];
    let missing: Vec<&str> =
        components.into_iter().filter(|(_, missing)| *missing).map(|(name, _)| name).collect();
    if missing.is_empty() {
        return String::new();
    }
    let missing = missing.join(" and no ");
    match super::matching_model(model.transformer.config.joint_attention_dim) {
        Some(name) => format!("\nit has no {missing}: run `kiln pull {name}`, whose components fit"),
        None => format!("\nit has no {missing}: put it into the same folder, or give it as an option"),
    }
}

fn is_set(name: &str) -> bool {
    let value = std::env::var(name).unwrap_or_default().to_ascii_lowercase();
    ["1", "true", "yes", "on"].contains(&value.as_str())
}

/// Download progress: a bar on a terminal, else a line per file.
struct DownloadDisplay {
    quiet: bool,
    bar: Option<ProgressBar>,
    file: Option<usize>,
}

impl DownloadDisplay {
    fn new(quiet: bool) -> DownloadDisplay {
        let bar = (!quiet && std::io::stderr().is_terminal()).then(|| {
            let bar = ProgressBar::new(1);
            let style = "{bar:20.cyan/dim} {binary_bytes} of {binary_total_bytes}, {binary_bytes_per_sec}, {eta} left  {wide_msg}";
            bar.set_style(ProgressStyle::with_template(style).unwrap_or_else(|_| ProgressStyle::default_bar()));
            bar
        });
        DownloadDisplay { quiet, bar, file: None }
    }

    fn update(&mut self, progress: PullProgress<'_>) {
        let PullProgress { file, index, files, done, total } = progress;
        let new = self.file.replace(index) != Some(index);
        let label = || format!("{}/{files} {}", index + 1, printable_line(file));
        match &self.bar {
            Some(bar) => {
                if new {
                    bar.set_length(total);
                    bar.set_message(label());
                    if index == 0 {
                        // Bytes of an earlier run don't count for the speed.
                        bar.set_position(done);
                        bar.reset_eta();
                    }
                }
                bar.set_position(done);
            }
            None if new && !self.quiet => {
                terminal::tell(&format!("{} ({} of {})", label(), bytes(done), bytes(total)));
            }
            None => {}
        }
    }

    fn clear(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}
