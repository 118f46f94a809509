//! The options of the invisible watermark.

use clap::Args;
use kiln_engine::Payload;

/// What watermark image files get.
#[derive(Clone, Copy, Debug, Default, Args)]
#[command(next_help_heading = "Output")]
pub struct WatermarkArgs {
    /// Watermark image files invisibly: 32 bits that survive compression, resizing and small crops; changes pixels a little.
    /// 8 hexadecimal digits, or Kiln's own without them [default: `watermark` of the settings]
    #[arg(long, value_name = "HEX", num_args = 0..=1, require_equals = true, default_missing_value = Payload::KILN_TEXT)]
    pub watermark: Option<Payload>,

    /// Write no watermark, whatever the settings say
    #[arg(long, conflicts_with = "watermark")]
    pub no_watermark: bool,
}
