//! `kiln queue` and `kiln workers`.

use std::fmt::Write;

use kiln_server::LoadedModel;
use kiln_server::fleet::{FleetJob, NodeRecord, QueueAdmin};

use super::shared::queue_error;
use crate::args::{QueueAddress, QueueArgs, QueueCommand, WorkersArgs};
use crate::error::CliError;
use crate::output;

fn open(address: &QueueAddress) -> Result<QueueAdmin, CliError> {
    QueueAdmin::open(address.fleet.config(&address.servers)).map_err(|error| queue_error(&error))
}

pub fn run(args: &QueueArgs) -> Result<(), CliError> {
    let admin = open(&args.queue)?;
    let failed = |error| queue_error(&error);
    match &args.command {
        QueueCommand::List { json } => print_jobs(&admin.jobs(), *json),
        QueueCommand::Dead { json } => print_jobs(&admin.dead().map_err(failed)?, *json),
        QueueCommand::Show { id } => match admin.job(id).map_err(failed)? {
            Some(job) => output::print(format!("{}\n", job.json).as_bytes()),
            None => Err(missing(id)),
        },
        QueueCommand::Retry { ids, all } => {
            let dead = if *all { admin.dead().map_err(failed)? } else { Vec::new() };
            let all = dead.iter().map(|job| job.id.clone());
            for id in ids.iter().cloned().chain(all) {
                if !admin.retry(&id).map_err(failed)? {
                    return Err(CliError::new(format!("the job `{id}` is not there, or did not fail"))
                        .hint("`kiln queue dead` lists jobs that can be tried again"));
                }
            }
            Ok(())
        }
        QueueCommand::Purge { ids, all, dead } => {
            let chosen: Vec<Option<&str>> =
                if *all { vec![None] } else { ids.iter().map(|id| Some(id.as_str())).collect() };
            for id in chosen {
                let purge = if *dead { admin.purge_dead(id) } else { admin.purge(id) };
                match (purge.map_err(failed)?, id) {
                    (0, Some(id)) => return Err(missing(id)),
                    (count, _) => output::print(format!("{count}\n").as_bytes())?,
                }
            }
            Ok(())
        }
    }
}

fn missing(id: &str) -> CliError {
    CliError::new(format!("there is no job `{id}`")).hint("`kiln queue list` and `kiln queue dead` list them")
}

fn print_jobs(jobs: &[FleetJob], json: bool) -> Result<(), CliError> {
    let mut text = String::new();
    for job in jobs {
        if json {
            let value: serde_json::Value = serde_json::from_str(&job.json).unwrap_or_default();
            let _ = writeln!(text, "{value}");
        } else {
            let FleetJob { id, client, state, priority, model, attempts, .. } = job;
            let worker = job.worker.as_deref().unwrap_or("-");
            let error =
                job.error.as_ref().map_or(String::new(), |(code, message)| format!("  {code}: {message}"));
            let line = format!(
                "{id}  {state:9}  {priority:6}  {model}  {client}  worker {worker}  attempts {attempts}{error}"
            );
            let _ = writeln!(text, "{}", kiln_base::printable_line(&line));
        }
    }
    output::print(text.as_bytes())
}

pub fn run_workers(args: &WorkersArgs) -> Result<(), CliError> {
    let mut text = String::new();
    for node in open(&args.queue)?.nodes() {
        if args.json {
            let _ = writeln!(text, "{}", serde_json::to_string(&node).unwrap_or_default());
        } else {
            let _ = writeln!(text, "{}", kiln_base::printable_line(&describe(&node)));
        }
    }
    output::print(text.as_bytes())
}

/// A device with its free memory: `cuda:0 (38 GiB free)`.
fn device_text(loaded: &LoadedModel) -> String {
    let free = loaded.free_memory.map(|free| format!(" ({:.0} GiB free)", free as f64 / f64::from(1 << 30)));
    format!("{}{}", loaded.device, free.unwrap_or_default())
}

fn describe(node: &NodeRecord) -> String {
    let NodeRecord { id, name, version, jobs, busy, .. } = node;
    if !node.worker {
        return format!("{id}  gateway  {name}  kiln {version}");
    }
    let models: Vec<String> = node
        .models
        .iter()
        .map(|model| {
            let name = &model.info.name;
            let loaded = if node.loaded.iter().any(|loaded| loaded.name == *name) { "*" } else { "" };
            let hash = model
                .hash
                .as_deref()
                .map_or(String::new(), |hash| format!("@{}", &hash[..hash.len().min(8)]));
            format!("{name}{loaded}{hash}")
        })
        .collect();
    let unusable: Vec<String> =
        node.unusable.iter().map(|(model, reason)| format!("  {model} can't be loaded: {reason}")).collect();
    let mut devices: Vec<String> = node.loaded.iter().map(device_text).collect();
    devices.dedup();
    let state = if node.draining { "draining" } else { "worker" };
    format!(
        "{id}  {state}  {name}  kiln {version}  {}  {}  busy {:.0} %  jobs {}{}",
        models.join(","),
        devices.join(","),
        busy * 100.0,
        jobs.len(),
        unusable.concat()
    )
}
