use std::io::Write;

use super::{Phase, Report};

/// Plain lines on standard error.
pub(super) struct Lines {
    pub verbose: bool,
}

impl Lines {
    pub fn report(&mut self, report: &Report<'_>) {
        if let Some(line) = line(report, self.verbose) {
            let _ = writeln!(std::io::stderr(), "{line}");
        }
    }
}

/// What a person is told; `None` for what only a bar shows.
pub(super) fn line(report: &Report<'_>, verbose: bool) -> Option<String> {
    Some(match report {
        Report::Started { model, variant, backend, dtype, seeds, .. } => match &seeds[..] {
            _ if verbose => format!("{variant} from `{model}` on {backend}, {dtype}, seed {}", list(seeds)),
            [Some(seed), rest @ ..] if rest.iter().all(|s| *s == Some(*seed)) => format!("seed {seed}"),
            _ => return None,
        },
        Report::Resolved { width, height, steps, first_step, sigmas, guidance, .. } => {
            let size = format!("{width}x{height}, {}", crate::values::plural(steps - first_step, "step"));
            let guidance = guidance.map_or(String::new(), |g| format!(", guidance {g}"));
            match verbose {
                true => format!("{size}{guidance}, sigmas {:?}", &sigmas[*first_step..]),
                false => format!("{size}{guidance}"),
            }
        }
        Report::PhaseDone { phase: Phase::Steps, .. } if !verbose => return None,
        Report::PhaseDone { phase, seconds } => format!("{phase} {seconds:.1} s"),
        Report::Step { picture, together, pictures, step, steps, sigma, seconds } => {
            let which = which(*picture, *together, *pictures);
            format!("{which}step {step}/{steps} sigma {sigma:.3} {seconds:.1} s")
        }
        Report::Lora { report } => (*report).to_owned(),
        Report::Note { text } => format!("note: {text}"),
        Report::Warning { text } => format!("warning: {text}"),
        Report::Picture { file, seed, width, height, seconds, .. } => {
            let file = if file == "-" { "standard output".into() } else { format!("`{file}`") };
            let seed = seed.map_or(String::new(), |s| format!("seed {s}, "));
            format!("saved {file} ({width}x{height}, {seed}{seconds:.1} s)")
        }
        Report::Latents { file } => format!("saved `{file}`"),
        Report::Phase { .. }
        | Report::Progress { .. }
        | Report::StepStarted { .. }
        | Report::Done { .. }
        | Report::Error { .. } => return None,
    })
}

/// `picture 2/3 ` or `pictures 1-2/3 `, or nothing when there is only one.
pub(super) fn which(picture: usize, together: usize, pictures: usize) -> String {
    match (pictures, together) {
        (..=1, _) => String::new(),
        (_, ..=1) => format!("picture {}/{pictures} ", picture + 1),
        _ => format!("pictures {}-{}/{pictures} ", picture + 1, picture + together),
    }
}

fn list(seeds: &[Option<u64>]) -> String {
    let mut texts: Vec<String> = seeds.iter().map(|s| s.map_or("none".into(), |s| s.to_string())).collect();
    texts.dedup();
    texts.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_one_plain_line() {
        let told = |picture, together, pictures| {
            let (step, steps, sigma, seconds) = (2, 4, 0.875, 3.12);
            line(&Report::Step { picture, together, pictures, step, steps, sigma, seconds }, false).unwrap()
        };
        assert_eq!(told(0, 1, 1), "step 2/4 sigma 0.875 3.1 s");
        assert_eq!(told(1, 1, 3), "picture 2/3 step 2/4 sigma 0.875 3.1 s");
        assert_eq!(told(0, 2, 3), "pictures 1-2/3 step 2/4 sigma 0.875 3.1 s");
    }

    #[test]
    fn one_seed_for_all_is_told_once() {
        let seeds = vec![Some(7), Some(7)];
        assert_eq!(list(&seeds), "7");
        assert_eq!(list(&[Some(7), Some(8)]), "7, 8");
    }
}
