//! Progress as plain lines.

use kiln_base::printable_line;

use super::{Phase, ProgressEvent};
use crate::terminal;

/// Prints progress as plain lines on standard error.
pub(super) struct ProgressLines {
    pub verbose: bool,
}

impl ProgressLines {
    pub fn report(&mut self, event: &ProgressEvent<'_>) {
        if let Some(line) = line(event, self.verbose) {
            terminal::tell(&line);
        }
    }
}

/// Formats an event as one safe line; `None` for events that only a bar shows.
pub(super) fn line(event: &ProgressEvent<'_>, verbose: bool) -> Option<String> {
    format_event(event, verbose).map(|line| printable_line(&line).into_owned())
}

fn format_event(event: &ProgressEvent<'_>, verbose: bool) -> Option<String> {
    Some(match event {
        ProgressEvent::Started { model, variant, backend, dtype, seeds, .. } => match &seeds[..] {
            _ if verbose => format!("{variant} from `{model}` on {backend}, {dtype}, seed {}", list(seeds)),
            [None, ..] | [] => return None,
            [Some(seed), rest @ ..] if rest.iter().all(|s| *s == Some(*seed)) => format!("seed {seed}"),
            several => format!("seeds {}", list(several)),
        },
        ProgressEvent::Resolved { width, height, steps, first_step, sigmas, guidance, cache, .. } => {
            let size = format!("{width}x{height}, {}", crate::values::plural(steps - first_step, "step"));
            let guidance = guidance.map_or(String::new(), |g| format!(", guidance {g}"));
            let guidance = cache.map_or(guidance.clone(), |c| format!("{guidance}, cache {c}"));
            if verbose {
                format!("{size}{guidance}, sigmas {:?}", &sigmas[*first_step..])
            } else {
                format!("{size}{guidance}")
            }
        }
        ProgressEvent::PhaseDone { phase: Phase::Steps, .. } if !verbose => return None,
        ProgressEvent::PhaseDone { phase, seconds } => format!("{phase} {seconds:.1} s"),
        ProgressEvent::Step { image, batch, images, step, steps, sigma, seconds, .. } => {
            let label = image_label(*image, *batch, *images);
            format!("{label}step {step}/{steps} sigma {sigma:.3} {seconds:.1} s")
        }
        ProgressEvent::Tile { tile, tiles, .. } => format!("tile {tile}/{tiles}"),
        ProgressEvent::Lora { report } => (*report).to_owned(),
        ProgressEvent::Note { text } => format!("note: {text}"),
        ProgressEvent::Warning { text } => format!("warning: {text}"),
        ProgressEvent::Image { file, seed, width, height, computed_steps, reused_steps, seconds, .. } => {
            let file = if file == "-" { "standard output".into() } else { format!("`{file}`") };
            let seed = seed.map_or(String::new(), |s| format!("seed {s}, "));
            let steps = computed_steps.zip(*reused_steps).map_or(String::new(), |(computed, reused)| {
                format!("{computed} of {} computed, ", crate::values::plural(computed + reused, "step"))
            });
            format!("saved {file} ({width}x{height}, {seed}{steps}{seconds:.1} s)")
        }
        ProgressEvent::Refused { index, reason, .. } => format!("image {}: {reason}", index + 1),
        ProgressEvent::Latents { file } => format!("saved `{file}`"),
        ProgressEvent::Phase { .. }
        | ProgressEvent::Progress { .. }
        | ProgressEvent::StepStarted { .. }
        | ProgressEvent::Done { .. }
        | ProgressEvent::Error { .. } => return None,
    })
}

/// `image 2/3 ` or `images 1-2/3 `; empty for a single image.
pub(super) fn image_label(image: usize, batch: usize, images: usize) -> String {
    if images <= 1 {
        String::new()
    } else if batch <= 1 {
        format!("image {}/{images} ", image + 1)
    } else {
        format!("images {}-{}/{images} ", image + 1, image + batch)
    }
}

/// `7`, `7 to 10`, `7, 3, 9`
fn list(seeds: &[Option<u64>]) -> String {
    if let [Some(first), _, .., Some(last)] = seeds
        && seeds.iter().enumerate().all(|(i, seed)| *seed == Some(first.wrapping_add(i as u64)))
    {
        return format!("{first} to {last}");
    }
    let mut texts: Vec<String> = seeds.iter().map(|s| s.map_or("none".into(), |s| s.to_string())).collect();
    texts.dedup();
    texts.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_one_plain_line() {
        let step_line = |image, batch, images| {
            let (step, steps, sigma, reused, seconds) = (2, 4, 0.875, 0, 3.12);
            let step = ProgressEvent::Step { image, batch, images, step, steps, sigma, reused, seconds };
            line(&step, false).unwrap()
        };
        assert_eq!(step_line(0, 1, 1), "step 2/4 sigma 0.875 3.1 s");
        assert_eq!(step_line(1, 1, 3), "image 2/3 step 2/4 sigma 0.875 3.1 s");
        assert_eq!(step_line(0, 2, 3), "images 1-2/3 step 2/4 sigma 0.875 3.1 s");
    }

    #[test]
    fn a_shared_seed_is_printed_once() {
        let seeds = vec![Some(7), Some(7)];
        assert_eq!(list(&seeds), "7");
        assert_eq!(list(&[Some(7), Some(8)]), "7, 8");
        assert_eq!(list(&[Some(7), Some(8), Some(9)]), "7 to 9");
        assert_eq!(list(&[Some(7), Some(9), Some(3)]), "7, 9, 3");
    }
}
