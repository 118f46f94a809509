//! What watermark image files get.

use kiln_engine::Payload;

use crate::args::WatermarkArgs;
use crate::settings;

impl WatermarkArgs {
    /// The watermark, if there is to be one.
    pub fn payload(&self) -> Option<Payload> {
        if self.no_watermark { None } else { self.watermark.or(settings::get().watermark) }
    }
}
