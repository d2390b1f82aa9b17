"""The pictures, a module each: the view (plain data), and the class that draws it. Each browser half is ``static/NAME.js``.

May import: core, resharding, viz.frame, viz.plain, viz.svg, viz.tokenmath.
"""
