//! Arguments of what generates jobs: `kiln serve` and `kiln worker`.

use std::path::PathBuf;

use clap::{ArgAction, Args};
use kiln_engine::Settings;

use crate::args::check::CheckArgs;
use crate::args::machine::MachineArgs;
use crate::args::sign::SignArgs;
use crate::args::watermark::WatermarkArgs;

/// The longest time that an option gives, in seconds: 30 days.
pub const MAX_SECONDS: u64 = 30 * 24 * 3600;

#[derive(Clone, Debug, Args)]
pub struct GeneratorArgs {
    /// Default model, for requests that name none: a path or a name [default: $KILN_MODEL, else that of `kiln config`,
    /// else ember]
    #[arg(short, long, value_name = "MODEL", help_heading = "Model")]
    pub model: Option<PathBuf>,

    /// Download the model without asking if it is not there
    #[arg(short, long, help_heading = "Model")]
    pub yes: bool,

    /// Load this model at startup, besides the default one; repeatable
    #[arg(long, value_name = "MODEL", help_heading = "Model", requires = "model_memory")]
    pub preload: Vec<String>,

    /// Keep several models loaded while their files have at most this size together, such as 20G; the least recently
    /// used one is dropped first [default: one model at a time]
    #[arg(long, value_name = "SIZE", help_heading = "Model", value_parser = crate::values::parse_bytes)]
    pub model_memory: Option<u64>,

    /// Folder with the LoRAs that requests may name [default: `loras` next to the models folder]
    #[arg(long, value_name = "DIR", env = "KILN_LORAS", help_heading = "Model")]
    pub loras: Option<PathBuf>,

    /// Default autoencoder, instead of the model's: TAEF2, or another FLUX.2 VAE
    #[arg(long, value_name = "FILE", help_heading = "Model")]
    pub vae: Option<PathBuf>,

    /// Folder with the autoencoders that requests may name [default: `vaes` next to the models folder]
    #[arg(long, value_name = "DIR", env = "KILN_VAES", help_heading = "Model")]
    pub vaes: Option<PathBuf>,

    /// Autoencoder for previews, such as TAEF2 [default: a linear projection, fitted to the model's autoencoder]
    #[arg(long, value_name = "FILE", help_heading = "Model")]
    pub preview_vae: Option<PathBuf>,

    /// Step cache for jobs that name no `cache`, on models with many steps; as for `kiln generate`
    #[arg(long, value_name = "THRESHOLD", help_heading = "Model", num_args = 0..=1, default_missing_value = "0.1", value_parser = kiln_engine::cache_threshold)]
    pub cache: Option<f32>,

    /// Leave recipes out of the image files that clients get
    #[arg(long, help_heading = "Limits and storage")]
    pub no_recipe: bool,

    /// Don't mark image files as made by AI (IPTC's properties as XMP); laws may ask for the mark
    #[arg(long, help_heading = "Limits and storage")]
    pub no_ai_mark: bool,

    #[command(flatten)]
    pub watermark: WatermarkArgs,

    /// Label for the XMP of image files, as China's GB 45438 asks of services: JSON with `Label`, `ContentProducer` and the
    /// five other keys, stored as `TC260:AIGC`
    #[arg(long, value_name = "JSON", help_heading = "Limits and storage", conflicts_with = "no_ai_mark", value_parser = aigc_label)]
    pub aigc_label: Option<String>,

    /// Maximum batch size: images of similar queued jobs are generated together where that is faster; 1 disables batching
    #[arg(long, value_name = "N", default_value_t = Settings::MAX_BATCH as u32, help_heading = "Limits and storage", value_parser = clap::value_parser!(u32).range(1..=64))]
    pub max_batch: u32,

    /// Maximum side of an image, in pixels; the same for a whole fleet
    #[arg(long, value_name = "N", default_value_t = 4096, help_heading = "Limits and storage", value_parser = clap::value_parser!(u32).range(16..=16_384))]
    pub max_side: u32,

    /// Maximum number of pixels of an image; the same for a whole fleet
    #[arg(long, value_name = "N", default_value_t = 4 << 20, help_heading = "Limits and storage", value_parser = clap::value_parser!(u64).range(256..=1 << 28))]
    pub max_pixels: u64,

    /// Maximum number of steps; the same for a whole fleet
    #[arg(long, value_name = "N", default_value_t = 200, help_heading = "Limits and storage", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub max_steps: u32,

    /// Maximum seconds for generating one job
    #[arg(long, value_name = "S", default_value_t = 3600, help_heading = "Limits and storage", value_parser = clap::value_parser!(u64).range(1..=MAX_SECONDS))]
    pub timeout: u64,

    /// Seconds to let running jobs finish when the process stops; unfinished jobs resume at the next start, or go to
    /// another worker
    #[arg(long, value_name = "S", default_value_t = 20, help_heading = "Limits and storage", value_parser = clap::value_parser!(u64).range(..=MAX_SECONDS))]
    pub grace: u64,

    /// OpenTelemetry collector that gets the traces of jobs, as OTLP over HTTP, such as http://localhost:4318
    #[arg(long, value_name = "URL", env = "OTEL_EXPORTER_OTLP_ENDPOINT", help_heading = "Network", value_parser = http_address)]
    pub otlp: Option<String>,

    #[command(flatten)]
    pub sign: SignArgs,

    #[command(flatten)]
    pub check: CheckArgs,

    #[command(flatten)]
    pub machine: MachineArgs,

    /// Don't use the on-disk cache of encoded texts (see `kiln doctor`)
    #[arg(long, help_heading = "Machine")]
    pub no_cache: bool,

    /// Write the log as JSON, one event per line
    #[arg(long, help_heading = "Output")]
    pub json: bool,

    /// Log more details
    #[arg(short, long, help_heading = "Output", action = ArgAction::SetTrue)]
    pub verbose: bool,
}

/// The keys that GB 45438 lists, all texts.
const AIGC_KEYS: [&str; 7] = [
    "Label",
    "ContentProducer",
    "ProduceID",
    "ReservedCode1",
    "ContentPropagator",
    "PropagateID",
    "ReservedCode2",
];

fn aigc_label(text: &str) -> Result<String, String> {
    let label: std::collections::BTreeMap<String, String> =
        serde_json::from_str(text).map_err(|error| format!("not JSON of texts: {error}"))?;
    let unknown = label.keys().find(|key| !AIGC_KEYS.contains(&key.as_str()));
    match (unknown, AIGC_KEYS.iter().find(|key| !label.contains_key(**key))) {
        (Some(key), _) => Err(format!("`{key}` is no key of the label; it has {}", AIGC_KEYS.join(", "))),
        (None, Some(key)) => Err(format!("`{key}` is missing; an empty text is allowed")),
        _ if !matches!(&label["Label"][..], "1" | "2" | "3") => Err("`Label` is 1, 2 or 3".into()),
        _ if text.len() > 8192 => Err("longer than 8192 bytes".into()),
        _ => Ok(text.to_owned()),
    }
}

fn http_address(text: &str) -> Result<String, String> {
    let is_http =
        ["http://", "https://"].iter().any(|scheme| text.strip_prefix(scheme).is_some_and(|h| !h.is_empty()));
    is_http.then(|| text.to_owned()).ok_or_else(|| "expected an address such as http://localhost:4318".into())
}
