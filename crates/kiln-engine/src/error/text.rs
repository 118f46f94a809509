//! Texts that name fields, so that each door can say them in its own words.

use std::borrow::Cow;
use std::fmt;

use super::Field;

/// A piece of a text: words, or a field with or without a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// Words that are the same for everybody.
    Words(Cow<'static, str>),
    /// A field, and the value it has or should have; `true` switches it on.
    Field(Field, Option<Cow<'static, str>>),
}

impl Field {
    /// The field with a value, as in `--dtype f32`.
    pub fn to(self, value: impl Into<Cow<'static, str>>) -> Piece {
        Piece::Field(self, Some(value.into()))
    }

    /// The field, switched on.
    pub fn on(self) -> Piece {
        self.to("true")
    }
}

/// How a door says a field and its value, such as `--dtype f32`; `None` if it has no such field.
pub type FieldNames = dyn Fn(Field, Option<&str>) -> Option<String>;

/// A text that may name fields, made by [`text!`](crate::text).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Text(Vec<Piece>);

impl Text {
    /// Creates a text of pieces.
    pub fn new(pieces: Vec<Piece>) -> Text {
        Text(pieces)
    }

    /// Returns the text in the words of a door; a field that it does not have is said by its name.
    pub fn say(&self, names: &FieldNames) -> String {
        let say = |piece: &Piece| match piece {
            Piece::Words(words) => words.to_string(),
            Piece::Field(field, value) => {
                names(*field, value.as_deref()).unwrap_or_else(|| piece.to_string())
            }
        };
        self.0.iter().map(say).collect()
    }

    /// Returns the fields that it names.
    pub fn fields(&self) -> impl Iterator<Item = Field> {
        self.0.iter().filter_map(|piece| match piece {
            Piece::Words(_) => None,
            Piece::Field(field, _) => Some(*field),
        })
    }
}

/// What to do about an error: one thing, or one of several, made by [`hint!`](crate::hint).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hint(Vec<Text>);

impl Hint {
    /// Creates a hint of what can be done, each instead of the others.
    pub fn new(alternatives: Vec<Text>) -> Hint {
        Hint(alternatives)
    }

    /// Returns what can be done at a door, in its words; `None` if it lacks the fields for all of it.
    pub fn say(&self, names: &FieldNames) -> Option<String> {
        let is_possible = |text: &&Text| {
            text.0.iter().all(|piece| match piece {
                Piece::Words(_) => true,
                Piece::Field(field, value) => names(*field, value.as_deref()).is_some(),
            })
        };
        let mut possible: Vec<String> =
            self.0.iter().filter(is_possible).map(|text| text.say(names)).collect();
        let last = possible.pop()?;
        Some(if possible.is_empty() { last } else { format!("{}, or {last}", possible.join(", ")) })
    }

    /// Adds something else that can be done.
    #[must_use]
    pub fn or(mut self, other: Hint) -> Hint {
        self.0.extend(other.0);
        self
    }
}

/// Makes a [`Text`](crate::Text) of words and fields: `text![Field::Mask, " needs ", Field::Init]`.
#[macro_export]
macro_rules! text {
    ($($piece:expr),+ $(,)?) => { $crate::Text::new(vec![$($crate::Piece::from($piece)),+]) };
}

/// Makes a [`Hint`](crate::Hint) of words and fields; semicolons separate what can be done instead. A door leaves out what
/// names a field that it does not have: `hint!["choose another ", Field::Output; "free some space"]`.
#[macro_export]
macro_rules! hint {
    ($($($piece:expr),+);+ $(;)?) => { $crate::Hint::new(vec![$($crate::text![$($piece),+]),+]) };
}

impl fmt::Display for Piece {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Piece::Words(words) => f.write_str(words),
            Piece::Field(field, None) => write!(f, "`{}`", field.name()),
            Piece::Field(field, Some(value)) => write!(f, "`{}` {value}", field.name()),
        }
    }
}

/// The names of fields in backticks.
impl fmt::Display for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|piece| piece.fmt(f))
    }
}

impl From<&'static str> for Piece {
    fn from(words: &'static str) -> Piece {
        Piece::Words(words.into())
    }
}

impl From<String> for Piece {
    fn from(words: String) -> Piece {
        Piece::Words(words.into())
    }
}

impl From<Field> for Piece {
    fn from(field: Field) -> Piece {
        Piece::Field(field, None)
    }
}

impl<W: Into<Piece>> From<W> for Text {
    fn from(words: W) -> Text {
        Text(vec![words.into()])
    }
}

impl<W: Into<Piece>> From<W> for Hint {
    fn from(words: W) -> Hint {
        Hint(vec![Text::from(words)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_door_says_the_fields_that_it_has() {
        let names = |field: Field, value: Option<&str>| match field {
            Field::Output => None,
            field => Some(format!("--{} {}", field.name(), value.unwrap_or("X"))),
        };
        let text = text![Field::Mask, " needs ", Field::Dtype.to("f32"), " and ", Field::Output];
        assert_eq!(text.say(&names), "--mask X needs --dtype f32 and `output`");
        assert_eq!(text.to_string(), "`mask` needs `dtype` f32 and `output`");
        let hint =
            hint!["choose another ", Field::Output; "free some space"; "use ", Field::Dtype.to("int8")];
        assert_eq!(hint.say(&names).unwrap(), "free some space, or use --dtype int8");
        assert_eq!(hint!["choose another ", Field::Output].say(&names), None);
    }
}
