//! `kiln quantize`: a model folder written again with its transformer in fewer bits, or one part of it as a file.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fs;
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};

use indicatif::{ProgressBar, ProgressStyle};
use kiln_weights::Component;
use kiln_weights::export::{Container, Names, Options, Storage, export};
use kiln_weights::quantise::{Group, Report, quantise};
use serde_json::Value;
use tempfile::TempDir;

use crate::args::QuantizeArgs;
use crate::cancel::Cancel;
use crate::convert::{Part, Wanted};
use crate::failure::{Failure, While};
use crate::hints;
use crate::sheet::Sheet;
use crate::values::{bytes, count};

const TRANSFORMER: &str = "transformer";
const WEIGHTS: &str = "diffusion_pytorch_model.safetensors";
const GGUF_WEIGHTS: &str = "diffusion_pytorch_model.gguf";

pub fn run(args: &QuantizeArgs) -> Result<(), Failure> {
    let report = match is_file(&args.out) {
        true => to_file(args)?,
        false => to_folder(args)?,
    };
    let sheet = sheet(&args.out, &report, args.to.name());
    let text = match args.json {
        true => sheet.to_json(),
        false => sheet.to_lines(),
    };
    if args.quiet { Ok(()) } else { crate::print(text.as_bytes()) }
}

/// Whether OUT is to be a file.
fn is_file(out: &Path) -> bool {
    let ending = out.extension().and_then(|e| e.to_str()).map(str::to_lowercase);
    matches!(ending.as_deref(), Some("gguf" | "safetensors"))
}

fn to_file(args: &QuantizeArgs) -> Result<Report, Failure> {
    let part = Part::open(&args.model, args.part)?;
    let threads = threads(args.threads.number);
    let Some(format) = args.to.format() else {
        let stop = Stop::new(Cancel::on_ctrl_c(), Progress::new(args.quiet));
        let report = quantise(part.source(), &args.out, threads, &mut |done, total| stop.tell(done, total));
        return stop.end(report).while_doing(|| format!("quantizing `{}`", args.model.display()));
    };
    let wanted = Wanted { names: None, storage: Storage::Packed(format), threads, shard: None };
    part.write(&args.out, &wanted, args.quiet)
}

fn to_folder(args: &QuantizeArgs) -> Result<Report, Failure> {
    let cancel = Cancel::on_ctrl_c();
    let plan = Plan::new(args)?;
    // Beside the place it gets: renamed when it is whole, gone when it does not become so.
    let beside = plan.out.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let making = tempfile::Builder::new().prefix(".kiln-").suffix(".tmp").tempdir_in(beside);
    let making = making.map_err(|e| {
        Failure::new(format!("can't make a folder in `{}`: {e}", beside.display())).hint("choose another OUT")
    })?;
    let report = plan.write(making.path(), args, cancel)?;
    place(making, &plan.out)?;
    Ok(report)
}

/// Threads that were asked for, or all.
pub fn threads(asked: Option<u32>) -> usize {
    let all = || std::thread::available_parallelism().ok().map(usize::from);
    asked.map(|n| n as usize).or_else(all).unwrap_or(1)
}

/// Progress that Ctrl-C ends.
pub struct Stop {
    cancel: Cancel,
    progress: Progress,
    asked: Cell<bool>,
}

impl Stop {
    pub fn new(cancel: Cancel, progress: Progress) -> Stop {
        Stop { cancel, progress, asked: Cell::new(false) }
    }

    /// Tells of progress; the error only ends the work.
    pub fn tell(&self, done: usize, total: usize) -> kiln_weights::Result<()> {
        self.progress.tell(done, total);
        self.asked.set(self.cancel.is_asked());
        match self.asked.get() {
            true => Err(kiln_weights::Error::NotFound { path: PathBuf::new() }),
            false => Ok(()),
        }
    }

    /// What came of it.
    pub fn end<T>(&self, result: kiln_weights::Result<T>) -> Result<T, Failure> {
        self.progress.end();
        match self.asked.get() {
            true => Err(Failure::cancelled()),
            false => Ok(result?),
        }
    }
}

/// What is read and where it goes.
struct Plan {
    model: PathBuf,
    out: PathBuf,
    /// Folders of the other parts, as `model_index.json` names them.
    parts: Vec<String>,
}

impl Plan {
    fn new(args: &QuantizeArgs) -> Result<Plan, Failure> {
        let model = args.model.as_path();
        if model.is_file() {
            return Err(Failure::new(format!("`{}` is a file, expected a model folder", model.display()))
                .hint("name a file as OUT, too, ending in .safetensors or .gguf"));
        }
        // Checks that it is a model, and one that makes sense.
        hints::open_model(model)?;
        if args.out.symlink_metadata().is_ok() {
            return Err(Failure::new(format!("`{}` exists already", args.out.display()))
                .hint("name a folder that does not exist yet"));
        }
        let index = model.join("model_index.json");
        let text = fs::read(&index).map_err(|e| read_failed(&index, &e))?;
        let index: BTreeMap<String, Value> = serde_json::from_slice(&text)
            .map_err(|e| Failure::new(format!("`{}` is not valid: {e}", index.display())))?;
        // A name is a plain one: a downloaded file must not reach outside its folder.
        let plain =
            |name: &str| Path::new(name).file_name().is_some_and(|f| f == name) && !name.starts_with('.');
        let parts = index.into_keys().filter(|name| name != TRANSFORMER && plain(name));
        let parts = parts.filter(|name| model.join(name).is_dir()).collect();
        Ok(Plan { model: model.to_owned(), out: args.out.clone(), parts })
    }

    fn write(&self, to: &Path, args: &QuantizeArgs, cancel: Cancel) -> Result<Report, Failure> {
        let own_name = to.join(TRANSFORMER);
        fs::create_dir(&own_name).map_err(|e| write_failed(&own_name, &e))?;
        let from = self.model.join(TRANSFORMER);
        let model = hints::open_model(&self.model)?;
        let source = model.transformer.weights()?;
        let threads = threads(args.threads.number);
        let stop = Stop::new(cancel, Progress::new(args.quiet));
        let tell = &mut |done, total| stop.tell(done, total);
        let report = match args.to.format() {
            None => quantise(source, &own_name.join(WEIGHTS), threads, tell),
            Some(format) => {
                let gguf = args.to.is_gguf();
                let options = Options {
                    component: Component::Transformer,
                    container: if gguf { Container::Gguf } else { Container::Safetensors },
                    names: if gguf { Names::Original } else { Names::Diffusers },
                    storage: Storage::Packed(format),
                    threads,
                };
                let file = own_name.join(if gguf { GGUF_WEIGHTS } else { WEIGHTS });
                export(source, &file, &options, tell)
            }
        };
        let report = stop.end(report).while_doing(|| format!("quantizing `{}`", from.display()))?;
        let Stop { cancel, progress, .. } = stop;
        let cancel = &cancel;
        copy_all(
            &from,
            &own_name,
            &|name| ![".safetensors", ".gguf", ".index.json"].iter().any(|end| name.ends_with(end)),
            cancel,
        )?;
        for part in &self.parts {
            progress.say(&format!("copying {part}"));
            let to = to.join(part);
            fs::create_dir(&to).map_err(|e| write_failed(&to, &e))?;
            copy_all(&self.model.join(part), &to, &|_| true, cancel)?;
        }
        // Cards and licences; not a second copy of the weights, as some downloads have.
        let text = |name: &str| {
            [".json", ".md", ".txt"].iter().any(|end| name.ends_with(end)) || name.starts_with("LICENSE")
        };
        copy_files(&self.model, to, &text, cancel)?;
        Ok(report)
    }
}

/// Copies a folder's accepted files, and its folders, but nothing hidden.
fn copy_all(from: &Path, to: &Path, accept: &dyn Fn(&str) -> bool, cancel: &Cancel) -> Result<(), Failure> {
    copy_files(from, to, accept, cancel)?;
    for (name, path) in entries(from)? {
        if path.is_dir() {
            let to = to.join(&name);
            fs::create_dir(&to).map_err(|e| write_failed(&to, &e))?;
            copy_all(&path, &to, accept, cancel)?;
        }
    }
    Ok(())
}

fn copy_files(from: &Path, to: &Path, accept: &dyn Fn(&str) -> bool, cancel: &Cancel) -> Result<(), Failure> {
    for (name, path) in entries(from)? {
        if cancel.is_asked() {
            return Err(Failure::cancelled());
        }
        if path.is_file() && accept(&name) {
            // Follows links, of which downloads are full.
            let to = to.join(&name);
            fs::copy(&path, &to).map_err(|e| write_failed(&to, &e))?;
        }
    }
    Ok(())
}

/// Names and paths in a folder, sorted, without what is hidden.
fn entries(folder: &Path) -> Result<Vec<(String, PathBuf)>, Failure> {
    let list = || -> io::Result<Vec<(String, PathBuf)>> {
        let named = |entry: fs::DirEntry| Some((entry.file_name().into_string().ok()?, entry.path()));
        let mut all = Vec::new();
        for entry in fs::read_dir(folder)? {
            all.extend(named(entry?).filter(|(name, _)| !name.starts_with('.')));
        }
        all.sort();
        Ok(all)
    };
    list().map_err(|e| read_failed(folder, &e))
}

/// Gives the finished folder its name.
pub fn place(making: TempDir, out: &Path) -> Result<(), Failure> {
    // Temporary folders are private; this one is as any other from now on.
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let open = fs::Permissions::from_mode(0o755);
        fs::set_permissions(making.path(), open).map_err(|e| write_failed(out, &e))?;
    }
    fs::rename(making.path(), out).map_err(|e| write_failed(out, &e))?;
    // It has moved: there is nothing left to remove.
    let _ = making.keep();
    Ok(())
}

pub fn sheet(out: &Path, report: &Report, packed: &str) -> Sheet {
    let [before, after] = report.bytes;
    let groups =
        report.groups.iter().fold(Sheet::default(), |sheet, Group { name, layers, weights, error }| {
            let about = Sheet::default()
                .with("layers", layers)
                .with_amount("weights", *weights, count(*weights))
                .with("relative_error", (error * 1e6).round() / 1e6);
            sheet.with_sheet(name, about)
        });
    Sheet::default()
        .with("path", out.display().to_string())
        .with_amount("bytes_before", before, bytes(before))
        .with_amount("bytes_after", after, bytes(after))
        .with("tensors_kept", report.copied)
        .with_sheet(packed, groups)
}

/// A bar on a terminal; elsewhere now and then a line.
pub enum Progress {
    Silent,
    Bar(ProgressBar),
    Lines,
}

impl Progress {
    pub fn new(quiet: bool) -> Progress {
        match () {
            () if quiet => Progress::Silent,
            () if io::stderr().is_terminal() => {
                let style =
                    ProgressStyle::with_template("{bar:20.cyan/dim} {elapsed:>4}, {eta} left  {wide_msg}");
                let style = style.unwrap_or_else(|_| ProgressStyle::default_bar());
                Progress::Bar(ProgressBar::new(1).with_style(style).with_message("writing"))
            }
            () => Progress::Lines,
        }
    }

    pub fn tell(&self, done: usize, total: usize) {
        match self {
            Progress::Silent => {}
            Progress::Bar(bar) => {
                bar.set_length(total as u64);
                bar.set_position(done as u64);
            }
            Progress::Lines if done * 10 / total > (done - 1) * 10 / total => {
                self.say(&format!("{done} of {total} tensors"));
            }
            Progress::Lines => {}
        }
    }

    fn say(&self, text: &str) {
        if !matches!(self, Progress::Silent) {
            let _ = writeln!(io::stderr(), "{text}");
        }
    }

    pub fn end(&self) {
        if let Progress::Bar(bar) = self {
            bar.finish_and_clear();
        }
    }
}

pub fn read_failed(path: &Path, error: &io::Error) -> Failure {
    Failure::new(format!("can't read `{}`: {error}", path.display()))
}

pub fn write_failed(path: &Path, error: &io::Error) -> Failure {
    Failure::new(format!("can't write `{}`: {error}", path.display()))
        .hint("check that there is room, and that the folder may be written")
}
