"""What a page that stands alone must not do: leave a tag open, load something."""

import html.parser

VOID = {"meta", "link", "img", "input", "br"}


class Checker(html.parser.HTMLParser):
    """Whether tags are closed in order, and what the page would load."""

    def __init__(self):
        super().__init__()
        self.open, self.loads = [], []

    def handle_starttag(self, tag, attributes):
        self.loads += [v for k, v in attributes if k in ("src", "href", "srcset", "action")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, (tag, self.getpos())
