use std::io::{IsTerminal, Write};
use std::path::Path;

use indicatif::{ProgressBar, ProgressStyle};
use kiln_engine::Parts;
use kiln_hub::{Name, Progress};

use crate::args::PullArgs;
use crate::cancel::Cancel;
use crate::failure::{Failure, While};
use crate::hints;
use crate::sheet::Sheet;
use crate::values::{bytes, plural};

pub fn run(args: &PullArgs) -> Result<(), Failure> {
    let name = Name::parse(&args.name)?;
    let settings = super::settings()?;
    if is_set("HF_HUB_OFFLINE") {
        return Err(Failure::new("the variable HF_HUB_OFFLINE forbids to fetch anything")
            .hint("unset it for this command"));
    }
    let cancel = Cancel::on_ctrl_c();
    let mut display = Display::new(args.quiet || args.json);
    let pulled = kiln_hub::pull(&settings, &name, &mut |progress| {
        display.tell(progress);
        !cancel.is_asked()
    });
    display.end();
    let pulled = pulled.while_doing(|| format!("fetching `{}` from {}", args.name, settings.endpoint))?;
    if args.json {
        let sheet = Sheet::default()
            .with("name", name.short())
            .with("repo", &name.repo)
            .with("commit", &pulled.commit)
            .with("folder", pulled.snapshot.display().to_string())
            .with("files", pulled.files)
            .with("bytes", pulled.bytes)
            .with("fetched", pulled.fetched);
        return crate::print(sheet.to_json().as_bytes());
    }
    if !args.quiet {
        let (files, size) = (plural(pulled.files, "file"), bytes(pulled.bytes));
        let fetched = match pulled.fetched {
            0 => "all there already".to_owned(),
            fetched => format!("{} fetched", bytes(fetched)),
        };
        let (folder, short) = (pulled.snapshot.display(), name.short());
        let more = lacking(&pulled.snapshot, &name);
        let text = format!("{files}, {size} ({fetched}) in `{folder}`\nuse it with -m {short}{more}\n");
        let _ = std::io::stderr().write_all(text.as_bytes());
    }
    Ok(())
}

/// What else is needed to paint with what was fetched: a transformer by itself has no text encoder and no autoencoder.
fn lacking(snapshot: &Path, name: &Name) -> String {
    if snapshot.join("model_index.json").is_file() && name.pattern.is_none() {
        return String::new();
    }
    let path = super::pulled(Path::new(&name.short())).map(|(_, path)| path);
    let Some(folder) = path.and_then(|path| hints::open_model_with(&path, &Parts::default()).ok()) else {
        return String::new();
    };
    let missing = [("text encoder", folder.text_encoder.is_none()), ("autoencoder", folder.vae.is_none())];
    let missing: Vec<&str> = missing.into_iter().filter(|(_, none)| *none).map(|(part, _)| part).collect();
    let model = super::whole_model(folder.transformer.config.joint_attention_dim);
    match (missing.is_empty(), model) {
        (true, _) => String::new(),
        (false, Some(model)) => {
            format!(
                "\nit has no {}: `kiln pull {model}` fetches a model whose parts are used for it",
                missing.join(" and no ")
            )
        }
        (false, None) => format!("\nit has no {}: put that beside it, or name it", missing.join(" and no ")),
    }
}

fn is_set(name: &str) -> bool {
    let value = std::env::var(name).unwrap_or_default().to_ascii_lowercase();
    ["1", "true", "yes", "on"].contains(&value.as_str())
}

/// A bar on a terminal, else a line for each file.
struct Display {
    quiet: bool,
    bar: Option<ProgressBar>,
    file: Option<usize>,
}

impl Display {
    fn new(quiet: bool) -> Display {
        let bar = (!quiet && std::io::stderr().is_terminal()).then(|| {
            let bar = ProgressBar::new(1);
            let style = "{bar:20.cyan/dim} {binary_bytes} of {binary_total_bytes}, {binary_bytes_per_sec}, {eta} left  {wide_msg}";
            bar.set_style(ProgressStyle::with_template(style).unwrap_or_else(|_| ProgressStyle::default_bar()));
            bar
        });
        Display { quiet, bar, file: None }
    }

    fn tell(&mut self, progress: Progress<'_>) {
        let Progress { file, index, files, done, total } = progress;
        let new = self.file.replace(index) != Some(index);
        let named = || format!("{}/{files} {file}", index + 1);
        match &self.bar {
            Some(bar) => {
                if new {
                    // What an earlier run has left is not this one's speed.
                    bar.set_length(total);
                    bar.set_message(named());
                    if index == 0 {
                        bar.set_position(done);
                        bar.reset_eta();
                    }
                }
                bar.set_position(done);
            }
            None if new && !self.quiet => {
                let _ = writeln!(std::io::stderr(), "{} ({} of {})", named(), bytes(done), bytes(total));
            }
            None => {}
        }
    }

    fn end(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}
