//! Sample images of a training: fixed prompts and seed, as rows of a contact sheet that grows with the steps.
//!
//! The LoRA is used from its file, as everyone will use it. A distilled model shows in four steps what the base needs dozens
//! for, so it is the better one to look at.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use kiln_engine::{
    BatchLimit, Embedded, FileRef, ImageCollector, LocalFiles, LoraRef, Model, Plan, Request, Settings,
    Setup, Task,
};
use kiln_image::{Filter, Format, RgbImage, resize, write_file};

use crate::dataset::{Dataset, ImageSize};
use crate::{Error, Result};

/// Images of a sheet by default.
const DEFAULT_SAMPLES: usize = 4;
/// Height of an image on the sheet of all steps.
const SHEET_SIDE: u32 = 256;
/// Space between images.
const GAP: u32 = 4;
/// Name of the sheet of all steps.
const SHEET: &str = "samples.png";

/// A prompt to sample, with the images that an edit starts from.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplePrompt {
    /// The prompt.
    pub prompt: String,
    /// The references.
    pub references: Vec<PathBuf>,
    /// Width and height in pixels.
    pub size: [u32; 2],
}

impl SamplePrompt {
    /// Returns the first different captions of the data, with their references.
    pub fn of_data(data: &Dataset) -> Vec<SamplePrompt> {
        let mut prompts: Vec<SamplePrompt> = Vec::new();
        for entry in data.entries.iter().filter(|entry| !entry.caption.is_empty()) {
            let references = entry.references.iter().map(|image| image.path.clone()).collect();
            let ImageSize::Bucket(size) = entry.image.size else { continue };
            if prompts.len() < DEFAULT_SAMPLES && prompts.iter().all(|other| other.prompt != entry.caption) {
                prompts.push(SamplePrompt { prompt: entry.caption.clone(), references, size });
            }
        }
        prompts
    }
}

/// Generates samples.
pub struct Sampler {
    /// The model to look at the LoRA with.
    pub model: Arc<Model>,
    /// Device and precision.
    pub settings: Settings,
    /// What to generate.
    pub prompts: Vec<SamplePrompt>,
    /// The seed of every image.
    pub seed: u64,
    /// Steps of an image; the model's default if absent.
    pub steps: Option<u32>,
    /// The folder of the sheets.
    pub folder: PathBuf,
}

impl Sampler {
    /// Generates all prompts with a LoRA, writes the sheet of this step and adds it to the sheet of all steps, whose path
    /// it returns. Without a LoRA it shows the model as it is.
    pub fn sample(&self, lora: Option<&Path>, step: u64) -> Result<PathBuf> {
        let mut tasks = Vec::with_capacity(self.prompts.len());
        let mut sinks = Vec::with_capacity(self.prompts.len());
        for SamplePrompt { prompt, references, size } in &self.prompts {
            let lora = lora.map(|path| LoraRef { path: path.to_owned(), weight: 1.0, sha256: None });
            let request = Request {
                loras: lora.into_iter().collect(),
                references: references.iter().cloned().map(FileRef::from).collect(),
                seed: vec![self.seed],
                steps: self.steps,
                width: Some(size[0]),
                height: Some(size[1]),
                ..Request::new(prompt)
            };
            let plan = Arc::new(Plan::new(&self.model, &request, &LocalFiles)?);
            let sink = Arc::new(ImageCollector::default());
            tasks.push(Task { plan, sink: sink.clone() });
            sinks.push(sink);
        }
        let Some(first) = tasks.first() else { return Ok(self.folder.clone()) };
        let engine = Setup::new(&self.model, &self.settings, Some(&first.plan))?.load(&*sinks[0])?;
        engine.generate(&tasks, &BatchLimit::ONE);
        engine.finish();
        let mut images = Vec::new();
        for sink in &sinks {
            images.extend(sink.take()?.into_iter().map(|generated| generated.image));
        }
        fs::create_dir_all(&self.folder).map_err(Error::io("create", &self.folder))?;
        let path = self.folder.join(format!("{step:06}.png"));
        self.save(&path, &row(&images))?;
        self.sheet()
    }

    /// Stacks the sheets of all steps.
    fn sheet(&self) -> Result<PathBuf> {
        let rows = sample_sheets(&self.folder);
        let rows = rows.iter().map(|(_, path)| kiln_image::open(path)).collect::<Result<Vec<_>, _>>()?;
        let path = self.folder.join(SHEET);
        self.save(&path, &column(&rows))?;
        Ok(path)
    }

    /// Writes a sheet, marked as made by a model.
    fn save(&self, path: &Path, sheet: &RgbImage) -> Result<()> {
        let format = Format::Png.into();
        let file =
            Embedded::default().encode_preview(sheet, format, &Request::new(""), &self.model.title())?;
        Ok(write_file(path, &file)?)
    }
}

/// The sheets of single steps in a folder of samples, in the order of the steps.
pub fn sample_sheets(folder: &Path) -> Vec<(u64, PathBuf)> {
    let step = |path: &Path| {
        let stem = path.file_stem()?.to_str()?;
        let is_step = stem.len() >= 6 && stem.bytes().all(|byte| byte.is_ascii_digit());
        is_step.then(|| stem.parse().ok())?
    };
    let paths = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let mut sheets: Vec<(u64, PathBuf)> = paths.filter_map(|path| Some((step(&path)?, path))).collect();
    sheets.sort();
    sheets
}

/// Images beside each other, all as high as the sheet's rows.
fn row(images: &[RgbImage]) -> RgbImage {
    let scaled: Vec<RgbImage> = images
        .iter()
        .map(|image| {
            let width = u64::from(image.width()) * u64::from(SHEET_SIDE) / u64::from(image.height().max(1));
            resize(image, (width as u32).max(1), SHEET_SIDE, Filter::Lanczos)
        })
        .collect();
    let width = scaled.iter().map(|image| image.width() + GAP).sum::<u32>().saturating_sub(GAP);
    let mut sheet = RgbImage::black(width.max(1), SHEET_SIDE);
    let mut left = 0;
    for image in &scaled {
        sheet.paste(image, left, 0);
        left += i64::from(image.width() + GAP);
    }
    sheet
}

/// Images below each other.
fn column(rows: &[RgbImage]) -> RgbImage {
    let width = rows.iter().map(RgbImage::width).max().unwrap_or(1);
    let height = rows.iter().map(|row| row.height() + GAP).sum::<u32>().saturating_sub(GAP);
    let mut sheet = RgbImage::black(width, height.max(1));
    let mut top = 0;
    for row in rows {
        sheet.paste(row, 0, top);
        top += i64::from(row.height() + GAP);
    }
    sheet
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sheet_has_a_row_for_every_step() {
        let images = [RgbImage::black(64, 64), RgbImage::black(64, 128)];
        let row = row(&images);
        assert_eq!((row.width(), row.height()), (256 + GAP + 128, 256));
        let sheet = column(&[row.clone(), row]);
        assert_eq!((sheet.width(), sheet.height()), (388, 516));
    }
}
