//! The text that an image is learned with.

/// How captions are changed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CaptionOptions {
    /// The word or phrase that is to stand for what is learned.
    pub trigger: Option<String>,
}

/// What stands for the trigger in captions that say where it goes.
const PLACEHOLDER: &str = "[trigger]";

/// Returns the caption with the trigger: in the place of `[trigger]`, else in front, unless it is there already. Without a
/// caption it is the trigger alone; `None` if there is neither.
pub fn caption(text: Option<&str>, options: &CaptionOptions) -> Option<String> {
    let Some(trigger) = options.trigger.as_deref() else { return text.map(str::to_owned) };
    let Some(text) = text else { return Some(trigger.to_owned()) };
    Some(if text.contains(PLACEHOLDER) {
        text.replace(PLACEHOLDER, trigger)
    } else if text.to_lowercase().contains(&trigger.to_lowercase()) {
        text.to_owned()
    } else {
        format!("{trigger}, {text}")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_trigger_is_added_once() {
        let options = CaptionOptions { trigger: Some("sks dog".into()) };
        let with = |text| caption(text, &options);
        assert_eq!(with(Some("in the snow")).unwrap(), "sks dog, in the snow");
        assert_eq!(with(Some("a SKS dog in the snow")).unwrap(), "a SKS dog in the snow");
        assert_eq!(with(Some("[trigger] in the snow")).unwrap(), "sks dog in the snow");
        assert_eq!(with(None).unwrap(), "sks dog");
        assert_eq!(caption(None, &CaptionOptions::default()), None);
    }
}
