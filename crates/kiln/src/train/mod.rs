//! `kiln train`: from a folder of images to a LoRA.

mod progress;

use kiln_catalog::{ember, user_cache};
use kiln_engine::Settings;
use kiln_train::{Outcome, PreparedTraining, RunFiles};

use crate::args::TrainArgs;
use crate::cancel::CancelFlag;
use crate::error::{CliError, ErrorKind};
use crate::{models, output, settings};
use progress::Display;

/// Runs the command.
pub fn run(mut args: TrainArgs) -> Result<(), CliError> {
    let cancel = CancelFlag::install();
    args.machine.fill_missing(settings::get());
    let TrainArgs { mut request, components, dry_run, quiet, machine } = args;
    let mut display = Display::new(quiet, cancel.clone());
    request.model = request.model.or_else(models::default_model);
    if request.model.is_none() && ember::is_built_in(ember::BASE) {
        request.model = Some(ember::BASE.into());
        display.tell("no model given, training on the built-in Ember base (choose another with -m)");
    }
    let machine = Settings { text_cache: user_cache::texts()?, ..machine.settings()? };
    let training = PreparedTraining::new(request, models::folders(), &components.paths(), machine)?;
    let job = &training.job;
    job.data.notes.iter().for_each(|note| display.tell(note));
    let examples = match job.data.epoch() {
        1 => "1 example".to_owned(),
        count => format!("{count} examples"),
    };
    display.tell(&format!("{examples}: {}", training.sizes().join(", ")));
    display.tell(&format!("base: {}, {}", job.model.recorded_name(), job.model.described_variant()));
    display.tell(&training.estimate.to_string());
    output::check_creatable(&job.files.folder).map_err(|error| error.hint("choose another -o"))?;
    if dry_run {
        return Ok(training.check_run(&mut |text| display.tell(text))?);
    }
    cancel.poll();
    let files = job.files.clone();
    let outcome = training.run(&mut display);
    display.finish();
    let outcome = outcome.map_err(|error| with_state(error.into(), &files))?;
    report(&outcome, &files, &display)
}

/// Says that the last checkpoint is kept if a file can't be written.
fn with_state(mut error: CliError, files: &RunFiles) -> CliError {
    if error.kind == ErrorKind::Failed && error.message.starts_with("can't write") {
        let hint =
            error.hint.get_or_insert("check that the disk is not full and the folder is writable".into());
        if files.state().is_file() {
            hint.push_str("; the last checkpoint is kept: continue with --resume");
        }
    }
    error
}

/// Tells how a training ended.
fn report(outcome: &Outcome, files: &RunFiles, display: &Display) -> Result<(), CliError> {
    if outcome.cancelled {
        display.tell(&format!(
            "stopped after step {}; the state is in `{}`: continue with --resume",
            outcome.step,
            files.folder.display()
        ));
        return Err(CliError::cancelled());
    }
    display.tell(&format!("norm of the update: {}", outcome.norms));
    if outcome.norms.is_zero() {
        display.tell("the LoRA changes nothing: train longer or with a higher --lr");
    }
    display.tell(&format!("wrote `{}`", files.output.display()));
    display.tell(&format!("use it with: kiln generate \"…\" --lora {}", files.output.display()));
    Ok(())
}
