//! File names from templates: `{prompt}-{seed}-{number}.png`.

use std::path::{Path, PathBuf};

use kiln_base::{Utc, windows_name_problem};
use kiln_engine::{ImagePlan, Plan};
use kiln_image::Format;

use crate::error::CliError;

/// What a template may contain.
const PLACEHOLDERS: [&str; 9] =
    ["prompt", "seed", NUMBER, "date", "time", "model", "width", "height", "steps"];
const NUMBER: &str = "number";
/// Also the number. Help texts can't name it: clap takes `{n}` for a line break.
const SHORT_NUMBER: &str = "n";

/// A file name with placeholders.
#[derive(Debug, PartialEq)]
pub struct Template {
    folder: PathBuf,
    /// Literal texts, each followed by a placeholder (the last by none).
    parts: Vec<(String, Option<&'static str>)>,
    pub format: Format,
}

/// The values of one image.
#[derive(Debug)]
pub struct ImageName<'a> {
    pub plan: &'a Plan,
    pub image: &'a ImagePlan,
    /// The number of the image in the run, from 1.
    pub number: usize,
}

impl Template {
    /// The default: a name from prompt and seed, in a folder.
    pub fn default_in(folder: &Path) -> Template {
        let parts = vec![(String::new(), Some("prompt")), ("-".into(), Some("seed")), (".png".into(), None)];
        Template { folder: folder.into(), parts, format: Format::Png }
    }

    /// Parses a path; `None` if it has no placeholder. Without an extension the file is a PNG.
    pub fn parse(path: &Path) -> Result<Option<Template>, CliError> {
        let Some(mut rest) = path.to_str().filter(|text| text.contains(['{', '}'])) else { return Ok(None) };
        let mut parts = Vec::new();
        let mut literal = String::new();
        while let Some(at) = rest.find(['{', '}']) {
            literal.push_str(&rest[..at]);
            let brace = &rest[at..=at];
            rest = &rest[at + 1..];
            if let Some(after) = rest.strip_prefix(brace) {
                literal.push_str(brace);
                rest = after;
                continue;
            }
            let Some((name, after)) = rest.split_once('}').filter(|_| brace == "{") else {
                return Err(invalid(path, &format!("has a lone `{brace}`")));
            };
            let name = if name == SHORT_NUMBER { NUMBER } else { name };
            let Some(known) = PLACEHOLDERS.iter().find(|known| **known == name) else {
                return Err(invalid(path, &format!("has an unknown placeholder `{{{name}}}`")));
            };
            parts.push((std::mem::take(&mut literal), Some(*known)));
            rest = after;
        }
        literal.push_str(rest);
        if !literal.contains('.') {
            literal.push_str(".png");
        }
        // A placeholder may stand before the dot.
        let format = Format::from_path(Path::new(&format!("x{literal}")))?;
        parts.push((literal, None));
        Ok(Some(Template { folder: PathBuf::new(), parts, format }))
    }

    /// Says why Windows can't have files of these names, whatever the placeholders stand for.
    pub fn windows_problem(&self) -> Option<&'static str> {
        let values =
            self.parts.iter().map(|(literal, value)| format!("{literal}{}", value.unwrap_or_default()));
        let path = without_devices(&values.collect::<String>());
        let is_drive = |part: &str| part.len() == 2 && part.ends_with(':');
        let names = path.split(['/', '\\']).enumerate().filter(|(i, part)| !(*i == 0 && is_drive(part)));
        let mut names = names.map(|(_, part)| part).filter(|part| !matches!(*part, "" | "." | ".."));
        // With this prefix, Windows takes every name as it is.
        if path.starts_with(r"\\?\") { None } else { names.find_map(windows_name_problem) }
    }

    /// Returns the part of the path that doesn't depend on the image: an existing folder, or one to create.
    pub fn fixed_folder(&self) -> PathBuf {
        let first = self.parts.first().map_or("", |(literal, _)| literal);
        let inside = first.rfind(['/', std::path::MAIN_SEPARATOR]).map_or("", |end| &first[..=end]);
        self.folder.join(inside)
    }

    /// Returns a path for the image that no file has yet: a higher `{number}`, or else a number at the end.
    pub fn free_path(&self, name: &ImageName<'_>) -> PathBuf {
        let counts = self.parts.iter().any(|(_, placeholder)| *placeholder == Some(NUMBER));
        let first = self.path(name, name.number);
        if !first.exists() {
            return first;
        }
        let other =
            |i: usize| if counts { self.path(name, name.number + i) } else { numbered(&first, i + 1) };
        (1..).map(other).find(|path| !path.exists()).unwrap_or(first)
    }

    fn path(&self, name: &ImageName<'_>, n: usize) -> PathBuf {
        let mut path = String::new();
        for (literal, placeholder) in &self.parts {
            path.push_str(literal);
            path.push_str(&placeholder.map_or(String::new(), |placeholder| value(placeholder, name, n)));
        }
        self.folder.join(if cfg!(windows) { without_devices(&path) } else { path })
    }
}

/// Marks the names in a path that Windows takes for devices: a prompt may be `aux`.
fn without_devices(path: &str) -> String {
    let part = |part: &str| {
        let (stem, rest) = part.split_at(part.find(['.', '/', '\\']).unwrap_or(part.len()));
        // Not the `C:` of a drive.
        let is_device = stem.chars().all(char::is_alphanumeric) && windows_name_problem(stem).is_some();
        format!("{stem}{}{rest}", if is_device { "_" } else { "" })
    };
    path.split_inclusive(['/', '\\']).map(part).collect()
}

fn value(placeholder: &str, name: &ImageName<'_>, n: usize) -> String {
    let or = |text: String, other: &str| if text.is_empty() { other.to_owned() } else { text };
    let plan = name.plan;
    match placeholder {
        "prompt" => or(name.image.prompt.as_deref().map(slug).unwrap_or_default(), "image"),
        "seed" => name.image.seed.map_or("noise".into(), |seed| seed.to_string()),
        NUMBER => n.to_string(),
        "date" => timestamp().0,
        "time" => timestamp().1,
        "model" => {
            let model = plan.model.recorded_name();
            let stem = Path::new(&model).file_stem().unwrap_or_default().to_string_lossy();
            or(slug(&stem), "model")
        }
        "width" => plan.output_size()[0].to_string(),
        "height" => plan.output_size()[1].to_string(),
        _ => plan.steps.to_string(),
    }
}

fn invalid(path: &Path, problem: &str) -> CliError {
    let known = PLACEHOLDERS.map(|name| format!("{{{name}}}")).join(", ");
    CliError::usage(format!("the file name `{}` {problem}", path.display()))
        .hint(format!("placeholders are {known}; a brace itself is written twice: {{{{"))
}

/// Returns the date (`2026-01-31`) and the time (`235959`) in UTC.
fn timestamp() -> (String, String) {
    let now = Utc::now();
    (now.date(), format!("{:02}{:02}{:02}", now.hour, now.minute, now.second))
}

/// `out.png` → `out-3.png`
pub fn numbered(path: &Path, number: usize) -> PathBuf {
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let extension = path.extension().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!("{stem}-{number}.{extension}"))
}

/// Turns the first words of a prompt into a file name.
fn slug(prompt: &str) -> String {
    const MAX_BYTES: usize = 48;
    let mut slug = String::new();
    for word in prompt.split(|c: char| !c.is_alphanumeric()).filter(|w| !w.is_empty()) {
        let word = word.to_lowercase();
        let room = MAX_BYTES.saturating_sub(slug.len() + 1);
        if slug.is_empty() {
            // A long first word is cut, between two characters.
            slug.extend(
                word.char_indices().take_while(|(i, c)| i + c.len_utf8() <= MAX_BYTES).map(|(_, c)| c),
            );
        } else if word.len() <= room {
            slug.push('-');
            slug.push_str(&word);
        } else {
            break;
        }
    }
    slug
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slug_is_short_and_safe() {
        assert_eq!(slug("A red fox, in the SNOW!"), "a-red-fox-in-the-snow");
        assert_eq!(slug("../../etc/passwd"), "etc-passwd");
        assert_eq!(slug("  …  "), "");
        assert_eq!(slug("雪の中の狐"), "雪の中の狐");
        let long = slug(&"word ".repeat(40));
        assert!(long.len() <= 48 && long.ends_with("-word"), "{long}");
        assert!(slug(&"雪".repeat(100)).len() <= 48);
    }

    #[test]
    fn a_prompt_that_windows_has_a_device_of_gets_another_name() {
        assert_eq!(without_devices("aux.png"), "aux_.png");
        assert_eq!(without_devices("con/nul-7.png"), "con_/nul-7.png");
        assert_eq!(without_devices("COM1.7.png"), "COM1_.7.png");
        for same in ["a red fox.png", r"C:\out\fox.png", r"\\?\C:\fox.png", "../auxin/fox.png"] {
            assert_eq!(without_devices(same), same);
        }
    }

    #[test]
    fn a_template_without_a_name_on_windows_is_known_before_the_image_is() {
        let problem = |text: &str| Template::parse(Path::new(text)).unwrap().unwrap().windows_problem();
        for wrong in ["{prompt} 12:30.png", "out?/{seed}.png", r"C:\out.\{seed}", "{seed}|.png"] {
            assert!(problem(wrong).is_some(), "{wrong}");
        }
        for good in [
            "{prompt}-{seed}.png",
            "aux/{n}.png",
            r"C:\out\{seed}.png",
            "../{n}",
            r"\\server\share\{n}",
            r"\\?\C:\a\{n}",
        ] {
            assert_eq!(problem(good), None, "{good}");
        }
    }

    #[test]
    fn templates_have_known_placeholders_and_extensions() {
        let parse = |text: &str| Template::parse(Path::new(text));
        assert_eq!(parse("fox.png").unwrap(), None);
        let template = parse("out/{{x}}-{seed}.jpg").unwrap().unwrap();
        assert_eq!(template.parts, [("out/{x}-".into(), Some("seed")), (".jpg".into(), None)]);
        assert_eq!((template.format, template.fixed_folder()), (Format::Jpeg, PathBuf::from("out/")));
        assert_eq!(parse("{prompt}-{n}").unwrap().unwrap().parts[2], (".png".into(), None));
        for (wrong, word) in [("{x}.png", "`{x}`"), ("{seed.png", "lone `{`"), ("}.png", "lone `}`")] {
            let error = parse(wrong).unwrap_err().to_string();
            assert!(error.contains(word) && error.contains("{prompt}, {seed}"), "{error}");
        }
        assert!(parse("{seed}.gif").unwrap_err().to_string().contains(".gif"));
    }
}
