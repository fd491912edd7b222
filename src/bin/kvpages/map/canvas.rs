//! Shapes and texts as SVG.

use std::fmt::Write;

/// Which end of a text its place is.
#[derive(Debug, Clone, Copy)]
pub enum Anchor {
    /// The first letter.
    Start,
    /// The middle.
    Middle,
    /// The last letter.
    End,
}

/// What a rectangle is filled with.
#[derive(Debug, Clone)]
pub enum Fill {
    /// A colour.
    Plain(String),
    /// Hatched.
    Padding,
    /// Dotted.
    Unused,
    /// Grey.
    Kept,
    /// White with a frame.
    Free,
}

/// A place and a size: x, y, width, height.
pub type Place = (f64, f64, f64, f64);

/// A picture of a width, as high as it becomes.
pub struct Canvas {
    width: f64,
    body: String,
}

impl Canvas {
    /// An empty picture.
    pub fn new(width: f64) -> Canvas {
        Canvas {
            width,
            body: String::new(),
        }
    }

    /// A rectangle, with the bytes it stands for, and what is said where a pointer rests on it.
    pub fn rect(&mut self, place: Place, fill: &Fill, bytes: Option<u64>, tip: &str) {
        let (x, y, width, height) = place;
        let (fill, stroke) = match fill {
            Fill::Plain(colour) => (colour.as_str(), ""),
            Fill::Padding => ("url(#padding)", ""),
            Fill::Unused => ("url(#unused)", ""),
            Fill::Kept => ("#9a9a9a", ""),
            Fill::Free => ("#fff", " stroke=\"#bbb\""),
        };
        let bytes = bytes.map_or(String::new(), |bytes| format!(" data-bytes=\"{bytes}\""));
        let _ = write!(
            self.body,
            "<rect x=\"{x:.2}\" y=\"{y:.2}\" width=\"{width:.2}\" height=\"{height:.2}\" fill=\"{fill}\"{stroke}{bytes}"
        );
        let _ = match tip {
            "" => writeln!(self.body, "/>"),
            tip => writeln!(self.body, "><title>{}</title></rect>", escaped(tip)),
        };
    }

    /// The edge of a page.
    pub fn outline(&mut self, (x, y, width, height): Place) {
        let _ = writeln!(
            self.body,
            "<rect x=\"{x:.2}\" y=\"{y:.2}\" width=\"{width:.2}\" height=\"{height:.2}\" fill=\"none\" stroke=\"#fff\" stroke-width=\"1\"/>"
        );
    }

    /// The edge of a bar.
    pub fn frame(&mut self, (x, y, width, height): Place) {
        let _ = writeln!(
            self.body,
            "<rect x=\"{x:.2}\" y=\"{y:.2}\" width=\"{width:.2}\" height=\"{height:.2}\" fill=\"none\" stroke=\"#666\"/>"
        );
    }

    /// A text.
    pub fn text(&mut self, x: f64, y: f64, size: f64, anchor: Anchor, colour: &str, text: &str) {
        let anchor = match anchor {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
            Anchor::End => "end",
        };
        let _ = writeln!(
            self.body,
            "<text x=\"{x:.2}\" y=\"{y:.2}\" font-size=\"{size}\" text-anchor=\"{anchor}\" fill=\"{colour}\">{}</text>",
            escaped(text)
        );
    }

    /// A heading.
    pub fn bold(&mut self, x: f64, y: f64, size: f64, text: &str) {
        let _ = writeln!(
            self.body,
            "<text x=\"{x:.2}\" y=\"{y:.2}\" font-size=\"{size}\" font-weight=\"bold\" fill=\"#111\">{}</text>",
            escaped(text)
        );
    }

    /// A line.
    pub fn line(&mut self, from: (f64, f64), to: (f64, f64), colour: &str) {
        let _ = writeln!(
            self.body,
            "<line x1=\"{:.2}\" y1=\"{:.2}\" x2=\"{:.2}\" y2=\"{:.2}\" stroke=\"{colour}\"/>",
            from.0, from.1, to.0, to.1
        );
    }

    /// Begins what belongs together.
    pub fn open_group(&mut self, name: &str) {
        let _ = writeln!(self.body, "<g id=\"{}\">", escaped(&name.replace(' ', "-")));
    }

    /// Ends it.
    pub fn close_group(&mut self) {
        self.body.push_str("</g>\n");
    }

    /// The picture.
    pub fn finish(self, height: f64) -> String {
        let (width, body) = (self.width, self.body);
        format!(
            "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n\
             <svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width:.0}\" height=\"{height:.0}\" viewBox=\"0 0 {width:.0} {height:.0}\" \
             font-family=\"Helvetica, Arial, 'Liberation Sans', sans-serif\">\n\
             <defs>\n\
             <pattern id=\"padding\" width=\"6\" height=\"6\" patternUnits=\"userSpaceOnUse\" patternTransform=\"rotate(45)\">\
             <rect width=\"6\" height=\"6\" fill=\"#f4d9d9\"/><rect width=\"2\" height=\"6\" fill=\"#c0392b\"/></pattern>\n\
             <pattern id=\"unused\" width=\"6\" height=\"6\" patternUnits=\"userSpaceOnUse\">\
             <rect width=\"6\" height=\"6\" fill=\"#f2f2f2\"/><circle cx=\"3\" cy=\"3\" r=\"1\" fill=\"#b5b5b5\"/></pattern>\n\
             </defs>\n\
             <rect x=\"0\" y=\"0\" width=\"{width:.0}\" height=\"{height:.0}\" fill=\"#fff\"/>\n\
             {body}</svg>\n"
        )
    }
}

/// Text that XML takes.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            // XML has none of these, whether escaped or not.
            '\u{fffe}' | '\u{ffff}' => out.push(' '),
            letter if letter.is_control() => out.push(' '),
            letter => out.push(letter),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_cannot_break_out() {
        assert_eq!(
            escaped("a<b>&\"c\"\u{7}\u{fffe}\u{ffff}"),
            "a&lt;b&gt;&amp;&quot;c&quot;   "
        );
    }
}
