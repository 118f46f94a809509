//! `kiln pull`: downloads a model into the Hugging Face cache.

use std::path::Path;
use std::time::{Duration, Instant};

use kiln_base::printable_line;
use kiln_catalog::cache;
use kiln_engine::ComponentPaths;
use kiln_hub::{HubSettings, ModelName, ModelPlan, PullProgress, PullSummary};

use crate::args::PullArgs;
use crate::cancel::CancelFlag;
use crate::error::{CliError, ErrorContext};
use crate::hub::consent;
use crate::progress::TaskDisplay;
use crate::terminal;
use crate::values::{bytes, duration, plural};
use kiln_catalog::properties::Properties;

pub fn run(args: &PullArgs) -> Result<(), CliError> {
    let name = ModelName::parse(&args.name).map_err(kiln_catalog::Error::from)?;
    let settings = kiln_catalog::download_settings()?;
    // A signal ends it at once, whatever the hub does: the next pull resumes what is there.
    let cancel = CancelFlag::install();
    let plan = kiln_hub::plan_model(&settings, &name)
        .map_err(kiln_catalog::Error::from)
        .with_context(|| format!("downloading `{}` from {}", args.name, settings.endpoint))?;
    consent::require(&plan, args.accept_license, args.quiet || args.json)?;
    let start = Instant::now();
    let pulled = download(&plan, &settings, args.quiet || args.json, &cancel)?;
    if args.json {
        let properties = Properties::default()
            .with("name", name.short())
            .with("repo", &name.repo)
            .with("commit", &pulled.commit)
            .with("licence", licence(&plan))
            .with("with", plan.companions.iter().map(|plan| plan.name.short()).collect::<Vec<_>>())
            .with("folder", pulled.snapshot.display().to_string())
            .with("files", pulled.files)
            .with("bytes", pulled.bytes)
            .with("fetched", pulled.downloaded);
        return crate::output::print(properties.to_json().as_bytes());
    }
    if !args.quiet {
        let (files, size) = (plural(pulled.files, "file"), bytes(pulled.bytes));
        let downloaded = match pulled.downloaded {
            0 => "already complete".to_owned(),
            fetched => format!("{} downloaded{}", bytes(fetched), speed(fetched, start.elapsed())),
        };
        let folder = pulled.snapshot.display();
        let used = usage(&pulled.snapshot, &name);
        let licence = licence(&plan).map_or(String::new(), |licence| format!(", licence {licence}"));
        let with = companions(&plan);
        let text = format!("{files}, {size} ({downloaded}){licence} in `{folder}`{with}\n{used}");
        terminal::tell(&text);
    }
    Ok(())
}

/// Returns the licence of a model: the terms that must be accepted, or what its repository states.
pub fn licence(plan: &ModelPlan) -> Option<String> {
    let terms = plan.model.terms.as_ref().map(|terms| terms.licence.clone());
    terms.or_else(|| plan.model.licence.clone())
}

/// ` with its text encoder …`: the files that complete the model, by their names.
fn companions(plan: &ModelPlan) -> String {
    let files = plan.companions.iter().flat_map(|plan| &plan.files);
    let names: Vec<String> = files.map(|file| format!("`{}`", printable_line(&file.path))).collect();
    if names.is_empty() { String::new() } else { format!("\nwith {}", names.join(" and ")) }
}

/// Downloads what is planned, and shows the progress.
pub fn download(
    plan: &ModelPlan,
    settings: &HubSettings,
    quiet: bool,
    cancel: &CancelFlag,
) -> Result<PullSummary, CliError> {
    let mut display = DownloadDisplay::new(quiet);
    display.task.finish_at_exit();
    let pulled = plan.run(settings, &mut |progress| {
        display.update(progress);
        !cancel.is_set()
    });
    display.task.finish();
    let pulled = pulled.map_err(kiln_catalog::Error::from);
    pulled.with_context(|| format!("downloading `{}` from {}", plan.model.name.short(), settings.endpoint))
}

/// `, 35.2 MiB/s`
fn speed(downloaded: u64, elapsed: Duration) -> String {
    let rate = downloaded as f64 / elapsed.as_secs_f64().max(1e-3);
    format!(", {}/s", bytes(rate as u64))
}

/// Says how to use what was pulled, and which components are missing: a lone transformer has no text encoder and no
/// autoencoder.
fn usage(snapshot: &Path, name: &ModelName) -> String {
    let short = name.short();
    let usage = format!("use it with -m {short}");
    if snapshot.join("model_index.json").is_file() && name.pattern.is_none() {
        return usage;
    }
    let Some((_, path)) = cache::find_pulled(Path::new(&short)) else { return usage };
    if let Some(component) = super::models::component(&path) {
        return format!("it is {component}: a transformer that lacks one, and that it fits, takes it");
    }
    let components = cache::with_companions(&short, &ComponentPaths::default());
    let Ok(model) = kiln_catalog::open_with(&path, &components) else { return usage };
    let Some(missing) = super::missing_components(&model) else { return usage };
    match model.matching_model() {
        Some(name) => format!("{usage}\nit has {missing}: run `kiln pull {name}`, whose components fit"),
        None => format!("{usage}\nit has {missing}: put it into the same folder, or give it as an option"),
    }
}

/// Download progress: a bar on a terminal, else a line per file and per half minute.
struct DownloadDisplay {
    task: TaskDisplay,
    file: Option<usize>,
    /// The time and the bytes present at the start.
    start: Option<(Instant, u64)>,
    line_at: Instant,
}

/// The time between lines about the same file.
const LINE_INTERVAL: Duration = Duration::from_secs(30);

impl DownloadDisplay {
    fn new(quiet: bool) -> DownloadDisplay {
        let template = "{bar:20.cyan/dim} {binary_bytes} of {binary_total_bytes}, {binary_bytes_per_sec}, {eta} left  {wide_msg}";
        let task = TaskDisplay::new(template, quiet);
        DownloadDisplay { task, file: None, start: None, line_at: Instant::now() }
    }

    fn update(&mut self, progress: PullProgress<'_>) {
        let PullProgress { file, index, files, done, total } = progress;
        let new = self.file.replace(index) != Some(index);
        let (start, before) = *self.start.get_or_insert_with(|| (Instant::now(), done));
        let label = || format!("{}/{files} {}", index + 1, printable_line(file));
        if let Some(bar) = self.task.advance(done, total) {
            if new {
                bar.set_message(label());
                if index == 0 {
                    // Bytes of an earlier run don't count for the speed.
                    bar.reset_eta();
                }
            }
        } else if new || self.line_at.elapsed() > LINE_INTERVAL {
            self.line_at = Instant::now();
            let left = time_left(done - before, total - done, start.elapsed());
            self.task.tell(&format!("{} ({} of {}{left})", label(), bytes(done), bytes(total)));
        }
    }
}

/// `, 35.2 MiB/s, 7m 5s left`; nothing before the first second, when there is nothing to tell.
fn time_left(downloaded: u64, left: u64, elapsed: Duration) -> String {
    if downloaded == 0 || elapsed < Duration::from_secs(1) {
        return String::new();
    }
    let seconds = elapsed.as_secs_f64() * left as f64 / downloaded as f64;
    let left = Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX);
    format!("{}, {} left", speed(downloaded, elapsed), duration(left))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_tell_speed_and_time_left() {
        let text = time_left(10 << 20, 4210 << 20, Duration::from_secs(2));
        assert_eq!(text, ", 5.0 MiB/s, 14m 2s left");
        assert_eq!(time_left(0, 10, Duration::from_secs(9)), "");
        assert_eq!(time_left(10, 10, Duration::from_millis(9)), "");
    }
}
